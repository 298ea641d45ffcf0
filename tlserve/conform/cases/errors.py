"""Errors: their document, and every status that a client can bring about."""

from __future__ import annotations

import trio

from tlserve.conform.answer import Answer
from tlserve.conform.case import Cases
from tlserve.conform.subject import CHAT, COMPLETIONS, EMBEDDINGS, Subject, skip_unless

CASES = Cases("api.md#errors")
HTTP = "http.md#what-is-refused-and-how"
MAX_REQUESTS = 512  # in flight to fill a queue
NUM_AT_ONCE = 32  # of them in each wave, so that a busy machine has time to read them all
WAVE_INTERVAL = 0.5  # seconds
RETRY_INTERVAL = 0.05  # seconds


@CASES.add("err.shape", 'an error is {"error": {message, type, param, code}}, as application/json', level="core")
async def shape(server: Subject) -> None:
    for answer in (await server.post(CHAT, b"{"), await server.post(CHAT, server.chat_body(messages=[]))):
        if answer.status < 400:
            answer.fail("an error", f"status {answer.status}")
        kind = answer.header("content-type")
        kind.check(kind.text().split(";")[0] == "application/json", "application/json")
        error = answer.document["error"]
        error.check(isinstance(error.value, dict), "an object")
        error.check({"message", "type", "param", "code"} <= error.value.keys(), "with message, type, param and code")
        error["message"].check(bool(error["message"].text()), "not empty")


@CASES.add("err.400", "a body that is no JSON, or has no messages, is 400", level="core")
async def bad_request(server: Subject) -> None:
    (await server.post(CHAT, b"{")).has_status(400)
    for body in ({"model": server.model}, server.chat_body(messages=[]), server.chat_body(messages="a")):
        (await server.post(CHAT, body)).has_status(400)


@CASES.add("err.404", "an unknown model and an unknown path are 404", level="core")
async def not_found(server: Subject) -> None:
    (await server.post(CHAT, server.chat_body(model="no-such-model"))).has_status(404)
    (await server.get("/no-such-route")).has_status(404)


@CASES.add("err.exact", "an error's document has those four keys alone, and an exact Content-Length")
async def exact(server: Subject) -> None:
    for answer in await _errors(server):
        answer.document["error"].check(
            list(answer.document["error"].value) == ["message", "type", "param", "code"],
            "message, type, param and code, and nothing else",
        )
        answer.header("content-length").equals(str(len(answer.body)))
        answer.header("content-type").equals("application/json")


async def _errors(server: Subject) -> list[Answer]:
    return [
        await server.post(CHAT, b"{"),
        await server.post(COMPLETIONS, server.text_body(echo=True)),
        await server.post(CHAT, server.chat_body(model="no-such-model")),
        await server.get("/no-such-route"),
        await server.request("DELETE", CHAT),
    ]


@CASES.add("err.type", "errors of the client have type invalid_request_error")
async def error_type(server: Subject) -> None:
    for answer in await _errors(server):
        answer.document["error"]["type"].equals("invalid_request_error")


@CASES.add("err.message", "a message names the value and the field, and holds no traceback")
async def message(server: Subject) -> None:
    answer = await server.post(CHAT, server.chat_body(temperature=3.25))
    text = answer.document["error"]["message"]
    text.check("3.25" in text.text() and "temperature" in text.text(), "naming temperature and 3.25")
    text.check("Traceback" not in text.text(), "no traceback")


@CASES.add("err.400.model", "a request without a model is 400 and named")
async def no_model(server: Subject) -> None:
    for path in (CHAT, COMPLETIONS, EMBEDDINGS, "/tokenize", "/detokenize"):
        (await server.post(path, {"messages": [{"role": "user", "content": "a"}], "prompt": "a"})).refuses(
            400, param="model"
        )


@CASES.add("err.400.context", "a prompt and max_tokens past the context are context_length_exceeded, with both numbers")
async def context(server: Subject) -> None:
    longest = await server.context()
    for path, body in (
        (CHAT, server.chat_body(max_tokens=longest + 1000)),
        (COMPLETIONS, server.text_body(max_tokens=longest + 1000)),
        (CHAT, server.chat_body(max_tokens=longest + 1000, stream=True)),
    ):
        text = (await server.post(path, body)).refuses(400, code="context_length_exceeded")["message"]
        digits = text.text().replace(",", "")
        text.check(str(longest) in digits and str(longest + 1000) in digits, f"naming {longest} and {longest + 1000}")


@CASES.add("err.400.input_context", "an input of embeddings past the context is context_length_exceeded")
async def input_context(server: Subject) -> None:
    ids = await server.tokens(text="a")
    body = {"input": ["a", ids * (await server.context() + 1)], "model": server.model}
    (await server.post(EMBEDDINGS, body)).refuses(400, code="context_length_exceeded", param="input[1]")


@CASES.add("err.401", "a wrong key and none are 401 invalid_api_key, with WWW-Authenticate: Bearer")
async def unauthorized(server: Subject) -> None:
    skip_unless(server.target.api_key is not None, "needs --api-key: the server may ask for none")
    wrong = (("Authorization", "Bearer wrong-key"),)
    for headers in ((), wrong):
        answer = await server.request("GET", "/models", headers=headers, with_key=False)
        answer.refuses(401, code="invalid_api_key")["type"].equals("authentication_error")
        answer.header("www-authenticate").equals("Bearer")


@CASES.add("err.404.model", "an unknown model is model_not_found on every route that takes one")
async def model_not_found(server: Subject) -> None:
    for path, body in (
        (CHAT, server.chat_body()),
        (CHAT, server.chat_body(stream=True)),
        (COMPLETIONS, server.text_body()),
        (EMBEDDINGS, {"input": "a"}),
        ("/tokenize", {"text": "a"}),
        ("/detokenize", {"tokens": [1]}),
    ):
        answer = await server.post(path, {**body, "model": "no-such-model"})
        answer.refuses(404, code="model_not_found", param="model")


@CASES.add("err.404.route", "an unknown path is route_not_found")
async def route_not_found(server: Subject) -> None:
    (await server.get("/no-such-route")).refuses(404, code="route_not_found")
    (await server.post("/no-such-route", {})).refuses(404, code="route_not_found")


@CASES.add("err.405", "a known path with another method is method_not_allowed, with Allow")
async def method_not_allowed(server: Subject) -> None:
    for method, path, allowed in (("GET", CHAT, "POST"), ("DELETE", "/models", "GET"), ("POST", "/models", "GET")):
        answer = await server.request(method, path)
        answer.refuses(405, code="method_not_allowed")
        allow = answer.header("allow")
        allow.check(allowed in [name.strip() for name in allow.text().split(",")], f"with {allowed}")


@CASES.add(
    "err.408", "a request that does not arrive in time is 408 request_timeout, then the end", page="http.md#deadlines"
)
async def request_timeout(server: Subject) -> None:
    head = server.head(CHAT).removesuffix(b"\r\n")
    answer = await server.raw(head, "the first headers of a POST, and no more")
    answer.refuses(408, code="request_timeout")["type"].equals("timeout_error")


@CASES.add("err.413", "a body past the limit is payload_too_large, then the end", page=HTTP)
async def payload_too_large(server: Subject) -> None:
    answer = await server.raw(server.head(CHAT, f"Content-Length: {10**15}"), "a POST of 10^15 bytes")
    answer.refuses(413, code="payload_too_large")


@CASES.add("err.431", "headers past the limit are headers_too_large, then the end", page=HTTP)
async def headers_too_large(server: Subject) -> None:
    answer = await server.raw(server.head("/models", f"X-Long: {'x' * 100_000}", method="GET"), "a header of 100 kB")
    answer.refuses(431, code="headers_too_large")


@CASES.add("err.429", "a full queue is rate_limit_exceeded at once, with Retry-After: 1", is_alone=True)
async def queue_full(server: Subject) -> None:
    """Sends more and more until one is refused. All are closed then, and the server must answer as before."""
    body = server.chat_body(max_tokens=min(await server.context() - 200, 4000), ignore_eos=True)
    refusals: list[Answer] = []
    refused = trio.Event()

    async def ask() -> None:
        answer = await server.post(CHAT, body)
        if answer.status != 200:
            refusals.append(answer)
            refused.set()

    async with trio.open_nursery() as nursery:
        for _ in range(MAX_REQUESTS // NUM_AT_ONCE):
            for _ in range(NUM_AT_ONCE):
                nursery.start_soon(ask)
            with trio.move_on_after(WAVE_INTERVAL):
                await refused.wait()
                break
        nursery.cancel_scope.cancel()
    skip_unless(bool(refusals), f"the server took {MAX_REQUESTS} requests at once")
    refusals[0].refuses(429, code="rate_limit_exceeded")["type"].equals("rate_limit_error")
    refusals[0].header("retry-after").equals("1")
    while (await server.post(CHAT, server.chat_body(max_tokens=1))).status != 200:  # noqa: ASYNC110 all that tells
        await trio.sleep(RETRY_INTERVAL)
