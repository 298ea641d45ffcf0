"""What holds on every route: methods, request ids, content types, the two headers of our own."""

from __future__ import annotations

from tlserve.conform.answer import Answer
from tlserve.conform.case import Cases
from tlserve.conform.subject import CHAT, Subject

CASES = Cases("http.md#http")
HEADERS = "api.md#headers"


@CASES.add("http.head", "HEAD works wherever GET does and sends the same headers without a body")
async def head(server: Subject) -> None:
    for path in ("/models", f"/models/{server.model}"):
        whole = (await server.get(path)).has_status(200)
        answer = (await server.request("HEAD", path)).has_status(200)
        answer.header("content-length").equals(whole.header("content-length").value)
        if answer.body:
            answer.fail("no body", f"{len(answer.body)} bytes")


@CASES.add("http.keep_alive", "a connection serves one request after the other")
async def keep_alive(server: Subject) -> None:
    get = server.head("/models", method="GET")
    last = server.head("/models", "Connection: close", method="GET")
    answer = await server.raw(get + last, "GET /models twice on one connection")
    count = answer.body.count(b"HTTP/1.1 200") + (answer.status == 200)
    if count != 2:
        answer.fail("2 answers of status 200", f"{count}, the first of status {answer.status}")


@CASES.add(
    "http.smuggling", "a request with both Content-Length and Transfer-Encoding is refused, and none behind it read"
)
async def smuggling(server: Subject) -> None:
    head = server.head(CHAT, "Content-Length: 5", "Transfer-Encoding: chunked")
    hidden = server.head("/models", "Connection: close", method="GET")
    answer = await server.raw(head + b"0\r\n\r\n" + hidden, "a POST with both lengths, and a GET behind it")
    answer.has_status(400)
    if b"HTTP/1.1 " in answer.body:
        answer.fail("one answer", "two")


@CASES.add("http.content_type", "a body is read as JSON whatever its Content-Type")
async def content_type(server: Subject) -> None:
    for name in ("application/x-www-form-urlencoded", "text/plain"):
        body = server.chat_body(max_tokens=1)
        (await server.post(CHAT, body, (("Content-Type", name),))).has_status(200).document["choices"].items(1)


@CASES.add("http.request_id.echoed", "a well-formed X-Request-Id of the client is given back", page=HEADERS)
async def request_id_echoed(server: Subject) -> None:
    for id in ("a", "Az09._:-", "x" * 128):
        (await server.get("/models", (("X-Request-Id", id),))).header("x-request-id").equals(id)


@CASES.add("http.request_id.fresh", "without a well-formed X-Request-Id there is a fresh one", page=HEADERS)
async def request_id_fresh(server: Subject) -> None:
    answers = [await server.get("/models", headers) for headers in ((), (), *_malformed_ids())]
    ids = [answer.header("x-request-id").text() for answer in answers]
    last = answers[-1]
    last.header("x-request-id").check(len(set(ids)) == len(ids), "an id that no other answer had")
    for answer, headers in zip(answers[2:], _malformed_ids(), strict=True):
        answer.header("x-request-id").check(answer.header("x-request-id").value != headers[0][1], "an id of its own")


def _malformed_ids() -> list[tuple[tuple[str, str], ...]]:
    return [(("X-Request-Id", id),) for id in ("", "a b", "a/b", "x" * 129)]


@CASES.add("http.request_id.everywhere", "errors and streams carry X-Request-Id too", page=HEADERS)
async def request_id_everywhere(server: Subject) -> None:
    own = (("X-Request-Id", "conform-1"),)
    answers: list[Answer] = [
        await server.get("/no-such-route", own),
        await server.post(CHAT, b"{", own),
        await server.stream(CHAT, server.chat_body(max_tokens=1), own),
    ]
    for answer in answers:
        answer.header("x-request-id").equals("conform-1")


@CASES.add("http.priority", "X-TL-Priority is an integer from -100 to 100, anything else is 400", page=HEADERS)
async def priority(server: Subject) -> None:
    body = server.chat_body(max_tokens=1)
    for value in ("-100", "0", "100"):
        (await server.post(CHAT, body, (("X-TL-Priority", value),))).has_status(200)
    for value in ("101", "-101", "1.5", "high", ""):
        (await server.post(CHAT, body, (("X-TL-Priority", value),))).refuses(400)


@CASES.add("http.kv_handle", "X-TL-KV-Handle is 404 kv_handle_not_found: there are no handles yet", page=HEADERS)
async def kv_handle(server: Subject) -> None:
    answer = await server.post(CHAT, server.chat_body(), (("X-TL-KV-Handle", "h1"),))
    answer.refuses(404, code="kv_handle_not_found")


@CASES.add("http.health_routes", "/healthz and /health on the API port are 200", page="closing.md#the-server")
async def health_routes(server: Subject) -> None:
    for path in ("/healthz", "/health"):
        for method in ("GET", "HEAD"):
            (await server.request(method, path, origin=server.target.root)).has_status(200)
