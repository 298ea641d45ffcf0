"""The promises of the v1 server, each under its own name, over real sockets wherever a socket is part of it."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio
import trio.testing

from tests.client import DONE, connect, get, joined, metric, post, stream_events, wait_for_metric
from tests.reference import ReferenceModel
from tlserve import ServeConfig, Server, serve
from tlserve.errors import ConfigError
from tlserve.model.checkpoint import open_checkpoint
from tlserve.text.template import DEFAULT_TEMPLATE, Template, TemplateError
from tlserve.text.text_stream import TextStream

FIXTURES = Path(__file__).parents[1] / "fixtures"
SUCC = FIXTURES / "succ"  # a byte-level bigram: after byte i comes byte i + 1
TINY = FIXTURES / "tiny-llama"
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SMOLLM2_TEMPLATE = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}"
    "{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def chat(model: str, content: str, **fields: Any) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": content}], **fields}


@pytest.fixture
async def succ() -> AsyncIterator[Server]:
    async with serve(ServeConfig.for_model(SUCC)) as server:
        yield server


@pytest.fixture
async def tiny() -> AsyncIterator[Server]:
    async with serve(ServeConfig.for_model(TINY)) as server:
        yield server


async def test_hand_example_chat_completion(succ: Server) -> None:
    """The worked example: the prompt is ``a``, three tokens follow, and the length cut is said to be one."""
    reply = await post(succ.http_addr, CHAT, chat("succ", "a", max_tokens=3, temperature=0))
    assert reply.status == 200
    assert reply.headers["content-type"] == "application/json"
    document = reply.json()
    assert document.pop("id").startswith("chatcmpl-")
    assert isinstance(document.pop("created"), int)
    assert isinstance(document.pop("system_fingerprint"), str)
    usage = document.pop("usage")
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (1, 3, 4)
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0
    choice = document["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "bcd", "refusal": None} | {
        key: value for key, value in choice["message"].items() if key not in ("role", "content", "refusal")
    }
    assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (0, "length", None)
    assert (document["object"], document["model"], len(document["choices"])) == ("chat.completion", "succ", 1)


async def test_stream_framing_role_first_then_done(succ: Server) -> None:
    """The exact bytes: one event a chunk, the role first, finish_reason on the last content chunk, usage, [DONE]."""
    body = chat("succ", "a", max_tokens=3, temperature=0, stream=True, stream_options={"include_usage": True})
    async with connect(succ.http_addr) as client:
        reply = await client.start("POST", CHAT, body)
        raw = b"".join([chunk async for chunk in client.chunks()])
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert reply.headers["cache-control"] == "no-store"
    assert raw.endswith(b"data: [DONE]\n\n")
    frames = raw.split(b"\n\n")
    assert frames.pop() == b""
    assert all(frame.startswith(b"data: ") and b"\n" not in frame for frame in frames)
    events = [json.loads(frame.removeprefix(b"data: ")) for frame in frames[:-1]]
    assert len(events) == 5
    assert len({event["id"] for event in events}) == len({event["created"] for event in events}) == 1
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    choices = [event["choices"][0] for event in events[:-1]]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert [choice["delta"] for choice in choices[1:]] == [{"content": "b"}, {"content": "c"}, {"content": "d"}]
    assert [choice["finish_reason"] for choice in choices] == [None, None, None, "length"]
    assert all(event["usage"] is None for event in events[:-1])
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["total_tokens"] == 4


async def test_stream_equals_nonstream_at_temperature_0(tiny: Server) -> None:
    """A random model's output is full of broken UTF-8; the deltas still join to the plain answer."""
    for content in ("Hi", "Tell me a story", "ü😀"):
        body = chat("tiny-llama", content, max_tokens=48, temperature=0)
        plain = (await post(tiny.http_addr, CHAT, body)).json()["choices"][0]
        events = await stream_events(tiny.http_addr, CHAT, body)
        assert joined(events) == plain["message"]["content"]
        assert events[-1] == DONE
        assert events[-2]["choices"][0]["finish_reason"] == plain["finish_reason"]


async def test_seed_reproduces_sampling(tiny: Server) -> None:
    async def answer(seed: int) -> str:
        body = chat("tiny-llama", "Hi", max_tokens=24, temperature=1, seed=seed)
        return str((await post(tiny.http_addr, CHAT, body)).json()["choices"][0]["message"]["content"])

    first = await answer(7)
    assert await answer(7) == first
    assert await answer(8) != first


@pytest.mark.parametrize("stream", [False, True])
async def test_stop_strings_end_generation_across_tokens(succ: Server, stream: bool) -> None:
    """``de`` comes as two tokens; nothing of it is sent."""
    body = chat("succ", "a", max_tokens=10, temperature=0, stop=["de"])
    if stream:
        events = await stream_events(succ.http_addr, CHAT, body)
        text, reason = joined(events), events[-2]["choices"][0]["finish_reason"]
    else:
        choice = (await post(succ.http_addr, CHAT, body)).json()["choices"][0]
        text, reason = choice["message"]["content"], choice["finish_reason"]
    assert (text, reason) == ("bc", "stop")


BAD_REQUESTS: list[tuple[dict[str, Any], int, str | None, str | None]] = [
    ({"temperature": -1}, 400, "temperature", None),
    ({"temperature": 2.5}, 400, "temperature", None),
    ({"top_p": 0}, 400, "top_p", None),
    ({"max_tokens": 0}, 400, "max_tokens", None),
    ({"max_tokens": "3"}, 400, "max_tokens", None),
    ({"stop": ["a", "b", "c", "d", "e"]}, 400, "stop", None),
    ({"messages": []}, 400, "messages", None),
    ({"messages": [{"role": "robot", "content": "x"}]}, 400, "messages[0].role", None),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]}, 422, None, "unsupported_parameter"),
    ({"n": 2}, 422, "n", "unsupported_parameter"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, 422, "tools", "unsupported_parameter"),
    ({"model": "nobody"}, 404, "model", "model_not_found"),
    ({"max_tokens": 1_000_000}, 400, None, "context_length_exceeded"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("fields", "status", "param", "code"), BAD_REQUESTS)
async def test_errors_use_the_openai_shape(
    fields: dict[str, Any], status: int, param: str | None, code: str | None, stream: bool
) -> None:
    async with serve(ServeConfig.for_model(SUCC)) as server:
        body = chat("succ", "a") | fields | {"stream": stream}
        reply = await post(server.http_addr, CHAT, body)
    assert (reply.status, reply.headers["content-type"]) == (status, "application/json")
    error = reply.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["code"] == code
    assert param is None or error["param"] == param


async def test_completions_endpoint_and_usage(succ: Server) -> None:
    """Sixteen tokens by default; the prompt is not part of the text."""
    document = (await post(succ.http_addr, COMPLETIONS, {"model": "succ", "prompt": "a", "temperature": 0})).json()
    assert document["object"] == "text_completion"
    assert document["choices"][0]["text"] == "bcdefghijklmnopq"
    assert document["choices"][0]["finish_reason"] == "length"
    assert {key: document["usage"][key] for key in ("prompt_tokens", "completion_tokens", "total_tokens")} == {
        "prompt_tokens": 1,
        "completion_tokens": 16,
        "total_tokens": 17,
    }


async def test_usage_counts_the_templated_prompt(tmp_path: Path) -> None:
    """A model without a template gets the default one, generation prompt included, and usage counts all of it."""
    model = tmp_path / "plain"
    model.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(SUCC / name, model / name)
    rendered = Template.parse(DEFAULT_TEMPLATE).render_chat([{"role": "user", "content": "Hello"}])
    assert rendered == "<|user|>\nHello\n<|assistant|>\n"
    async with serve(ServeConfig.for_model(model)) as server:
        reply = await post(server.http_addr, CHAT, chat("plain", "Hello", max_tokens=1))
    assert reply.json()["usage"]["prompt_tokens"] == len(rendered)


async def test_full_queue_answers_429_with_retry_after() -> None:
    """One runs, one waits, the third is refused at once; the waiting one runs in its turn."""
    config = ServeConfig.for_model(SUCC, max_num_seqs=1, queue_capacity=1, step_delay=0.02)
    async with serve(config) as server, trio.open_nursery() as nursery, connect(server.http_addr) as first:
        await first.start("POST", CHAT, chat("succ", "a", max_tokens=2000, stream=True))
        answers: list[Any] = []

        async def wait_in_queue() -> None:
            answers.append(await post(server.http_addr, CHAT, chat("succ", "a", max_tokens=2, temperature=0)))

        nursery.start_soon(wait_in_queue)
        await wait_for_metric(server.health_addr, "tl_engine_queue_depth", 1)
        began = trio.current_time()
        refused = await post(server.http_addr, CHAT, chat("succ", "a", max_tokens=2))
        assert trio.current_time() - began < 1.0
        assert (refused.status, refused.headers["retry-after"]) == (429, "1")
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        await first.stream.aclose()
        with trio.fail_after(10):  # the first would have run for longer than that
            while not answers:
                await trio.testing.wait_all_tasks_blocked(0.01)
        assert answers[0].json()["choices"][0]["message"]["content"] == "bc"


@pytest.mark.parametrize("stream", [False, True])
async def test_disconnect_frees_blocks_within_a_step(stream: bool) -> None:
    config = ServeConfig.for_model(TINY, step_delay=0.01, prefix_cache="off")
    async with serve(config) as server:
        async with connect(server.http_addr) as client:
            body = json.dumps(chat("tiny-llama", "Hi", max_tokens=400, ignore_eos=True, stream=stream)).encode()
            head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
            await client.stream.send_all(head + body)
            await wait_for_metric(server.health_addr, "tl_engine_active_sequences", 1)
        await wait_for_metric(server.health_addr, "tl_engine_active_sequences", 0)
        await wait_for_metric(server.health_addr, 'tl_engine_kv_blocks{state="used"}', 0)
        assert await metric(server.health_addr, "tl_engine_queue_depth") == 0


async def test_drain_finishes_in_flight_and_refuses_new() -> None:
    async with serve(ServeConfig.for_model(SUCC, step_delay=0.02)) as server:
        assert (await get(server.health_addr, "/readyz")).status == 200
        async with connect(server.http_addr) as client, connect(server.health_addr) as health:
            assert (await health.request("GET", "/healthz")).status == 200
            await client.start("POST", CHAT, chat("succ", "a", max_tokens=40, stream=True))
            server.drain()
            assert (await get(server.health_addr, "/readyz")).status == 503
            assert (await get(server.health_addr, "/healthz")).status == 200
            with pytest.raises(OSError, match="all attempts to connect"):
                await get(server.http_addr, "/v1/models")
            events = [event async for event in client.events()]
    assert events[-1] == DONE
    assert events[-2]["choices"][0]["finish_reason"] == "length"


async def test_embeddings_are_mean_pooled_and_normalized() -> None:
    """Each vector is the normalised mean of the final hidden states of its own input, in input order."""
    reference = ReferenceModel(open_checkpoint(TINY))
    inputs = ["first", "a second, longer input"]
    async with serve(ServeConfig.for_model(TINY, kv_dtype="f32")) as server:
        reply = await post(server.http_addr, "/v1/embeddings", {"model": "tiny-llama", "input": inputs})
    data = reply.json()["data"]
    assert [item["index"] for item in data] == [0, 1]
    for text, item in zip(inputs, data, strict=True):
        mean = reference.hidden(list(text.encode())).mean(axis=0)
        np.testing.assert_allclose(item["embedding"], mean / np.linalg.norm(mean), atol=1e-5)
        assert math.isclose(float(np.linalg.norm(item["embedding"])), 1.0, rel_tol=1e-5)


async def test_tokenize_models_health_and_request_id(succ: Server) -> None:
    tokens = (await post(succ.http_addr, "/v1/tokenize", {"model": "succ", "text": "abc"})).json()
    assert (tokens["tokens"], tokens["count"]) == ([97, 98, 99], 3)
    text = (await post(succ.http_addr, "/v1/detokenize", {"model": "succ", "tokens": [97, 98, 99]})).json()
    assert text["text"] == "abc"
    models = (await get(succ.http_addr, "/v1/models")).json()
    assert [model["id"] for model in models["data"]] == ["succ"]
    assert (await get(succ.http_addr, "/v1/models/succ")).json()["object"] == "model"
    assert (await get(succ.http_addr, "/v1/models/other")).json()["error"]["code"] == "model_not_found"
    for address in (succ.http_addr, succ.health_addr):
        assert (await get(address, "/healthz")).status == 200
    echoed = await get(succ.http_addr, "/v1/models", headers=[("X-Request-Id", "abc-1.2:3_4")])
    assert echoed.headers["x-request-id"] == "abc-1.2:3_4"
    fresh = [(await get(succ.http_addr, "/nowhere")).headers["x-request-id"] for _ in range(2)]
    assert len({*fresh, ""}) == 3


async def test_concurrent_streams_equal_serial() -> None:
    """Half greedy, half seeded: eight answers at once are the eight answers one by one.

    All the while the event loop goes on: between two steps /healthz answers more than once.
    """
    async with serve(ServeConfig.for_model(TINY, step_delay=0.03)) as server:
        bodies = [
            chat("tiny-llama", f"question {i}", max_tokens=24, temperature=i % 2, seed=i, ignore_eos=True)
            for i in range(8)
        ]
        together = [""] * len(bodies)
        num_healthy = 0

        async def ask(index: int) -> None:
            together[index] = joined(await stream_events(server.http_addr, CHAT, bodies[index]))

        async def watch_health() -> None:
            nonlocal num_healthy
            async with connect(server.health_addr) as client:
                while True:
                    num_healthy += (await client.request("GET", "/healthz")).status == 200

        async with trio.open_nursery() as watching:
            watching.start_soon(watch_health)
            async with trio.open_nursery() as nursery:
                for index in range(len(bodies)):
                    nursery.start_soon(ask, index)
            watching.cancel_scope.cancel()
        assert num_healthy > 2 * 24
    async with serve(ServeConfig.for_model(TINY)) as server:
        assert together == [joined(await stream_events(server.http_addr, CHAT, body)) for body in bodies]


def test_chat_template_hand_example() -> None:
    """SmolLM2's own template by hand, then the parts of the language that templates use."""
    template = Template.parse(SMOLLM2_TEMPLATE)
    system = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    assert template.render_chat([{"role": "user", "content": "Hi"}]) == (
        system + "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    own = [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "Hi"}]
    assert template.render_chat(own, add_generation_prompt=False) == (
        "<|im_start|>system\nBe brief<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
    )
    pieces = Template.parse(
        "{%- for m in messages -%} {% if m.role == 'system' %}S{% elif m.role == 'user' %}"
        "{{ m.content | trim | upper }}{% else %}?{% endif %}{% if not loop.last %}, {% endif %}{%- endfor -%} ."
    )
    assert pieces.render_chat([*own, {"role": "tool", "content": ""}], add_generation_prompt=False) == "S, HI, ?."
    default = Template.parse(DEFAULT_TEMPLATE)
    assert default.render_chat(own) == "<|system|>\nBe brief\n<|user|>\nHi\n<|assistant|>\n"


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}",
        "{% if x %}",
        "{{ x ",
        "{% frobnicate %}",
        "{{ x | frobnicate }}",
        "{% if false %}{{ x | frobnicate }}{% endif %}",
        "{{ x is frobnicated }}",
        "{% endfor %}",
        "{{ 1 + }}",
    ],
)
def test_template_errors_are_caught_at_parse(source: str) -> None:
    with pytest.raises(TemplateError):
        Template.parse(source)


def test_text_stream_holds_back_stop_prefixes() -> None:
    stream = TextStream(["de"])
    assert [stream.push(byte) for byte in (b"b", b"c", b"d", b"x")] == ["b", "c", "", "dx"]
    assert [stream.push(b"d"), stream.push(b"e"), stream.push(b"f")] == ["", "", ""]
    assert stream.stopped
    assert stream.finish() == ""

    text = "a😀ďé漢"
    stream = TextStream()
    pushed = [stream.push(bytes([byte])) for byte in text.encode()]
    assert "".join(pushed) == text
    assert all(piece == "" or piece in text for piece in pushed)
    assert stream.push("😀".encode()[:2]) == ""
    assert stream.finish() == "\ufffd"


def test_runtime_toml_and_env_overrides() -> None:
    text = """
    [engine]
    model_dir = "artifacts/models/smol-135m/v3"
    http_listen = ":8000"
    health_listen = ":9464"
    prefix_cache = "radix"
    prefill_chunk = 512
    """
    config = ServeConfig.from_toml(text, {})
    assert (config.model_id, config.http_listen, config.queue_capacity) == ("smol-135m", ":8000", 64)
    assert (config.engine.prefix_cache, config.engine.prefill_chunk) == ("radix", 512)
    tuned = ServeConfig.from_toml(text, {"TL_ENGINE__PREFILL_CHUNK": "64", "TL_ENGINE__MODEL_ID": "other"})
    assert (tuned.engine.prefill_chunk, tuned.model_id) == (64, "other")
    for line in ("prefil_chunk = 1", "prefill_chunk = -1", 'prefix_cache = "tree"', "queue_capacity = 0"):
        with pytest.raises(ConfigError, match=line.split(" = ")[0]):
            ServeConfig.from_toml(f"[engine]\nmodel_dir = 'm'\n{line}", {})


async def test_speculative_runtime_config_drives_the_serving_path(tmp_path: Path) -> None:
    """Prompt lookup from a runtime.toml drafts and accepts tokens, and changes no answer."""
    table = f'[engine]\nmodel_dir = "{SUCC}"\nhttp_listen = "127.0.0.1:0"\nhealth_listen = "127.0.0.1:0"\n'
    body = {"model": "succ", "prompt": "ghijklmnopqrstuvwxyz, gh", "max_tokens": 12, "temperature": 0}
    answers, accepted = [], []
    for speculative in ("", '[engine.speculative]\nmethod = "prompt_lookup"\nnum_tokens = 4\n'):
        (tmp_path / "runtime.toml").write_text(table + speculative)
        async with serve(ServeConfig.load(tmp_path / "runtime.toml")) as server:
            answers.append((await post(server.http_addr, COMPLETIONS, body)).json()["choices"][0])
            page = (await get(server.health_addr, "/metrics")).body.decode()
            accepted.append("tl_engine_spec_accepted_tokens_total 0.0" not in page)
    assert answers[0] == answers[1]
    assert accepted == [False, True]
