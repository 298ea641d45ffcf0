"""A server that is told of a collector: what its traces hold, and what they leave out."""

from __future__ import annotations

import logging
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from tests.client import connect, get, post, wait_for_metric
from tests.tracing.collector import Collected, attributes, collecting_grpc, collecting_http
from tlserve import ServeConfig, serve

ROOT = Path(__file__).parents[2]
SUCC = ROOT / "fixtures" / "succ"  # a byte-level bigram: after byte i comes byte i + 1
CHAT = "/v1/chat/completions"
TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
PARENT_ID = "b7ad6b7169203331"
PARENT = ("traceparent", f"00-{TRACE_ID}-{PARENT_ID}-01")
SECRET = "the client's own words"


def chat(**fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "a"}]
    return {"model": "succ", "messages": messages, "max_tokens": 3, "temperature": 0} | fields


def succ(**overrides: Any) -> ServeConfig:
    return ServeConfig.for_model(SUCC, **overrides)


@pytest.fixture
def collected(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collected]:
    with collecting_http() as collected:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collected.endpoint)
        yield collected


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_is_one_span_with_its_phases_below_it(collected: Collected, stream: bool) -> None:
    before = time.time_ns()
    async with serve(succ()) as server:
        reply = await post(server.http_addr, CHAT, chat(stream=stream, seed=5, top_p=0.5), [("X-Request-Id", "mine")])
    after = time.time_ns()
    assert collected.paths == ["/v1/traces"]
    root = collected.root()
    assert (root.name, root.parent_span_id, root.status.code) == (f"POST {CHAT}", b"", Status.STATUS_CODE_UNSET)
    phases = collected.children(root)
    assert phases.keys() == {"queue", "prefill", "decode"}
    assert {span.trace_id for span in collected.spans} == {root.trace_id}
    borders = [root.start_time_unix_nano]
    for name in ("queue", "prefill", "decode"):
        borders += [phases[name].start_time_unix_nano, phases[name].end_time_unix_nano]
    borders.append(root.end_time_unix_nano)
    assert borders == sorted(borders)
    assert borders[2] == borders[3]
    assert borders[4] == borders[5]
    assert before <= borders[0]
    assert borders[-1] <= after
    assert attributes(root) | {"gen_ai.response.id": "..."} == {
        "http.request.method": "POST",
        "http.route": CHAT,
        "http.response.status_code": 200,
        "http.response.header.x-request-id": ["mine"],
        "url.scheme": "http",
        "url.path": CHAT,
        "server.address": "test",
        "tlserve.outcome": "complete",
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "trio-tlserve",
        "gen_ai.request.model": "succ",
        "gen_ai.request.max_tokens": 3,
        "gen_ai.request.temperature": 0.0,
        "gen_ai.request.top_p": 0.5,
        "gen_ai.request.seed": 5,
        "gen_ai.response.model": "succ",
        "gen_ai.response.id": "...",
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.usage.input_tokens": 1,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "gen_ai.usage.output_tokens": 3,
    } | ({"gen_ai.request.stream": True} if stream else {})
    if not stream:
        assert attributes(root)["gen_ai.response.id"] == reply.json()["id"]


async def test_the_callers_trace_goes_on_and_is_told_to_the_client_and_the_log(
    collected: Collected, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "tlserve")
    state = [("tracestate", "vendor=one"), ("tracestate", "other@tenant=two")]
    async with serve(succ()) as server:
        reply = await post(server.http_addr, CHAT, chat(), [PARENT, *state])
        refused = await get(server.http_addr, "/v1/nowhere", [PARENT])
    root, nowhere = collected.roots()
    assert (root.trace_id.hex(), root.parent_span_id.hex()) == (TRACE_ID, PARENT_ID)
    assert root.trace_state == "vendor=one,other@tenant=two"
    assert reply.headers["traceresponse"] == f"00-{TRACE_ID}-{root.span_id.hex()}-01"
    assert refused.headers["traceresponse"] == f"00-{TRACE_ID}-{nowhere.span_id.hex()}-01"
    records = [record for record in caplog.records if record.getMessage() == "request"]
    assert [vars(record)["trace_id"] for record in records] == [TRACE_ID, TRACE_ID]


async def test_no_span_holds_text_of_a_client(collected: Collected) -> None:
    """Of a body, a query, a header or a key; the path and the host are all there is, and the model where it exists."""
    async with serve(succ()) as server:
        secret = [{"role": "user", "content": SECRET}]
        body = chat(messages=secret, stop=[SECRET], user=SECRET, max_tokens=40)
        for bad in ({}, {"model": SECRET}, {"temperature": SECRET}, {SECRET: 1}):
            await post(server.http_addr, f"{CHAT}?q={SECRET[:3]}", body | bad, [("Authorization", SECRET)])
        await post(server.http_addr, "/v1/embeddings", {"model": "succ", "input": [SECRET]})
        await post(server.http_addr, "/v1/tokenize", {"model": "succ", "text": SECRET})
    assert len(collected.roots()) == 6
    assert SECRET.encode() not in collected.raw
    assert b"?q=" not in collected.raw


@pytest.mark.parametrize(("port", "told"), [("8000", 8000), ("", None), ("65536", None), ("9" * 5000, None)])
async def test_a_port_that_is_none_is_left_out(collected: Collected, port: str, told: int | None) -> None:
    request = f"GET /v1/models HTTP/1.1\r\nHost: api.test:{port}\r\nConnection: close\r\n\r\n"
    async with serve(succ()) as server, connect(server.http_addr) as client:
        await client.stream.send_all(request.encode())
        reply = b"".join([chunk async for chunk in client.stream])
    assert reply.startswith(b"HTTP/1.1 200 ")
    values = attributes(collected.root())
    assert (values["server.address"], values.get("server.port")) == ("api.test", told)


@pytest.mark.parametrize("top_k", [2**63, 10**900])
async def test_a_number_past_64_bits_is_held_at_the_largest(
    collected: Collected, caplog: pytest.LogCaptureFixture, top_k: int
) -> None:
    async with serve(succ()) as server:
        assert (await post(server.http_addr, CHAT, chat(top_k=top_k))).status == 200
    assert attributes(collected.root())["gen_ai.request.top_k"] == 2**63 - 1
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


async def test_embeddings_have_no_decode(collected: Collected) -> None:
    async with serve(succ()) as server:
        body = {"model": "succ", "input": ["abc", "de"], "encoding_format": "base64"}
        await post(server.http_addr, "/v1/embeddings", body)
    root = collected.root()
    assert collected.children(root).keys() == {"queue", "prefill"}
    values = {name: value for name, value in attributes(root).items() if name.startswith("gen_ai.")}
    assert values == {
        "gen_ai.operation.name": "embeddings",
        "gen_ai.provider.name": "trio-tlserve",
        "gen_ai.request.model": "succ",
        "gen_ai.request.encoding_formats": ["base64"],
        "gen_ai.embeddings.dimension.count": 256,
        "gen_ai.response.model": "succ",
        "gen_ai.usage.input_tokens": 5,
        "gen_ai.usage.cache_read.input_tokens": 0,
    }


async def test_several_prompts_are_one_span(collected: Collected) -> None:
    async with serve(succ()) as server:
        body = {"model": "succ", "prompt": ["a", "bc"], "max_tokens": 2, "top_k": 3, "presence_penalty": 1}
        await post(server.http_addr, "/v1/completions", body)
    root = collected.root()
    assert len(collected.children(root)) == 3
    values = attributes(root)
    assert values["gen_ai.operation.name"] == "text_completion"
    assert values["gen_ai.request.choice.count"] == 2
    assert (values["gen_ai.request.top_k"], values["gen_ai.request.presence_penalty"]) == (3, 1.0)
    assert values["gen_ai.response.finish_reasons"] == ["length", "length"]
    assert (values["gen_ai.usage.input_tokens"], values["gen_ai.usage.output_tokens"]) == (3, 4)


async def test_what_a_client_did_wrong_is_named_and_is_no_error_of_the_span(collected: Collected) -> None:
    async with serve(succ()) as server, connect(server.http_addr) as client:
        for method, path, body in (("POST", CHAT, chat(temperature=9)), ("BREW", "/coffee%20/x", None)):
            assert (await client.request(method, path, body)).status in (400, 404)
    bad, unknown = collected.roots()
    assert (bad.name, attributes(bad)["error.type"]) == (f"POST {CHAT}", "invalid_request_error")
    assert (unknown.name, attributes(unknown)["error.type"]) == ("HTTP", "route_not_found")
    assert attributes(unknown)["http.request.method"] == "_OTHER"
    assert attributes(unknown)["http.request.method_original"] == "BREW"
    assert attributes(unknown)["url.path"] == "/coffee%20/x"
    assert {span.status.code for span in (bad, unknown)} == {Status.STATUS_CODE_UNSET}
    assert collected.children(bad) == {}


async def test_what_the_server_could_not_do_is_an_error(collected: Collected) -> None:
    async with serve(succ(step_delay=0.005, drain_timeout_ms=50)) as server, connect(server.http_addr) as client:
        await client.start("POST", CHAT, chat(max_tokens=4000, stream=True))
        server.drain()
        assert [event async for event in client.events()][-1]["error"]["code"] == "shutting_down"
    root = collected.root()
    assert root.status.code == Status.STATUS_CODE_ERROR
    values = attributes(root)
    assert (values["error.type"], values["tlserve.outcome"]) == ("shutting_down", "failed")
    assert "gen_ai.response.finish_reasons" not in values
    assert collected.children(root).keys() == {"queue", "prefill", "decode"}


async def test_a_client_that_leaves_ends_its_span(collected: Collected) -> None:
    async with serve(succ(step_delay=0.005)) as server:
        async with connect(server.http_addr) as client:
            await client.start("POST", CHAT, chat(max_tokens=4000, stream=True))
        await wait_for_metric(server.health_addr, "tl_engine_active_sequences", 0)
    root = collected.root()
    assert attributes(root)["tlserve.outcome"] == "client_left"
    assert root.status.code == Status.STATUS_CODE_UNSET
    assert collected.children(root).keys() == {"queue", "prefill", "decode"}


async def test_probes_are_not_followed(collected: Collected) -> None:
    async with serve(succ()) as server:
        for address, path in (
            (server.http_addr, "/healthz"),
            (server.http_addr, "/health"),
            (server.health_addr, "/readyz"),
        ):
            assert "traceresponse" not in (await get(address, path)).headers
    assert collected.spans == []


@pytest.mark.parametrize(("flags", "num_sent"), [("01", 1), ("00", 0)])
async def test_the_callers_choice_of_sampling_is_kept(collected: Collected, flags: str, num_sent: int) -> None:
    async with serve(succ()) as server:
        reply = await post(server.http_addr, CHAT, chat(), [("traceparent", f"00-{TRACE_ID}-{PARENT_ID}-{flags}")])
    assert reply.headers["traceresponse"].startswith(f"00-{TRACE_ID}-")
    assert reply.headers["traceresponse"].endswith(f"-{flags}")
    assert len(collected.roots()) == num_sent


async def test_the_environment_says_who_sends_how_and_how_much(
    collected: Collected, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "one")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test,service.version=7")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-tenant=a")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip")
    async with serve(succ()) as server:
        await post(server.http_addr, CHAT, chat())
    (resource,) = collected.resources
    assert resource["service.name"] == "one"
    assert (resource["deployment.environment.name"], resource["service.version"]) == ("test", "7")
    assert (collected.headers[0]["x-tenant"], collected.headers[0]["content-encoding"]) == ("a", "gzip")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    async with serve(succ()) as server:
        await post(server.http_addr, CHAT, chat(), [PARENT])
    assert len(collected.roots()) == 1


async def test_without_a_name_a_service_has_ours(collected: Collected) -> None:
    async with serve(succ()) as server:
        await post(server.http_addr, CHAT, chat())
    assert collected.resources[0]["service.name"] == "trio-tlserve"
    assert collected.resources[0]["service.version"]


async def test_traces_go_by_grpc_where_the_environment_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with collecting_grpc() as collected:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", collected.endpoint)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
        async with serve(succ()) as server:
            await post(server.http_addr, CHAT, chat())
    assert collected.root().kind == Span.SPAN_KIND_SERVER
    assert len(collected.spans) == 4


async def test_two_servers_of_one_process_send_their_own(collected: Collected, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serve(succ()) as one:
        with collecting_http() as others:
            monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", others.endpoint)
            async with serve(succ()) as other:
                await post(other.http_addr, CHAT, chat())
                await post(other.http_addr, CHAT, chat())
            assert len(others.roots()) == 2
        await post(one.http_addr, CHAT, chat())
    assert len(collected.roots()) == 1


def test_a_server_without_traces_does_not_load_opentelemetry() -> None:
    program = f"""
import sys, trio
from tlserve import ServeConfig, serve

async def main():
    async with serve(ServeConfig.for_model({str(SUCC)!r})):
        print(sorted(name for name in sys.modules if name.startswith("opentelemetry")))

trio.run(main)
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert result.stdout == "[]\n"
