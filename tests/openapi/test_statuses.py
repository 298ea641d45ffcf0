"""Every status that the document lists can be had from a live server, and its answer is as described.

Each way below asks for an operation so that it answers with one status. A pair of the document without a way fails.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.client import connect, wait_for_metric
from tests.http.client import RawClient, RawResponse
from tests.openapi.described import OPERATIONS, check_answer
from tlserve import ServeConfig, Server, serve
from tlserve.openai import body
from tlserve.openai.operations import MODEL

FIXTURES = Path(__file__).parents[2] / "fixtures"


@dataclass(frozen=True)
class Asked:
    """One operation, with a body that it takes."""

    method: str
    path: str
    body: dict[str, Any] | None

    @property
    def target(self) -> str:
        return self.path.replace("{id}", MODEL)

    def but(self, fields: Mapping[str, object]) -> Asked:
        """With other fields in its body."""
        return self if self.body is None else replace(self, body={**self.body, **fields})

    def request(self, *headers: str, version: str = "HTTP/1.1", host: str = "test") -> bytes:
        """Its bytes; a length among the headers stands for its own."""
        payload = b"" if self.body is None else json.dumps(self.body).encode()
        length = [] if any("Content-Length" in header for header in headers) else [f"Content-Length: {len(payload)}"]
        lines = [f"{self.method} {self.target} {version}", f"Host: {host}", *length, *headers, "", ""]
        return "\r\n".join(lines).encode() + payload


Way = Callable[[Asked], Awaitable[RawResponse]]


@asynccontextmanager
async def server_with(**overrides: Any) -> AsyncIterator[Server]:
    async with serve(ServeConfig.for_model(FIXTURES / "succ", model_id=MODEL, **overrides)) as server:
        yield server


async def answer(server: Server, data: bytes) -> RawResponse:
    async with await trio.open_tcp_stream(*server.http_addr) as stream:
        await stream.send_all(data)
        with trio.fail_after(10):
            return await RawClient(stream).response()


async def well(asked: Asked) -> RawResponse:
    async with server_with() as server:
        return await answer(server, asked.request())


async def with_a_host_that_is_none(asked: Asked) -> RawResponse:
    async with server_with() as server:
        return await answer(server, asked.request(host="a b"))


async def without_a_key(asked: Asked) -> RawResponse:
    with tempfile.NamedTemporaryFile("w") as keys:
        keys.write("sk-right")
        keys.flush()
        async with server_with(api_keys_file=Path(keys.name)) as server:
            return await answer(server, asked.request())


async def of_another_model(asked: Asked) -> RawResponse:
    async with server_with() as server:
        data = asked.but({"model": "nobody"}).request()
        return await answer(server, data.replace(f"/v1/models/{MODEL} ".encode(), b"/v1/models/nobody "))


async def with_a_body_that_does_not_come(asked: Asked) -> RawResponse:
    async with server_with(body_timeout_ms=20) as server:
        return await answer(server, asked.request("Content-Length: 1000"))


async def with_a_body_that_is_too_large(asked: Asked) -> RawResponse:
    async with server_with(max_body_bytes=999) as server:
        return await answer(server, asked.request("Content-Length: 1000"))


UNSERVED: dict[str, dict[str, object]] = {
    "/v1/chat/completions": {"n": 2},
    "/v1/completions": {"n": 2},
    "/v1/embeddings": {"dimensions": 3},
    "/v1/tokenize": {"text": None, "messages": [{"role": "user", "content": []}]},
}


async def with_a_field_that_is_not_served(asked: Asked) -> RawResponse:
    async with server_with() as server:
        return await answer(server, asked.but(UNSERVED[asked.path]).request())


async def with_a_full_queue(asked: Asked) -> RawResponse:
    """One request runs, one waits."""
    endless = Asked("POST", "/v1/completions", {"model": MODEL, "prompt": "a", "max_tokens": 4000, "stream": True})
    async with (
        server_with(max_num_seqs=1, queue_capacity=1, step_delay=0.005) as server,
        connect(server.http_addr) as running,
        connect(server.http_addr) as waiting,
    ):
        await running.stream.send_all(endless.request())
        await wait_for_metric(server.health_addr, "tl_engine_active_sequences", 1)
        await waiting.stream.send_all(endless.request())
        await wait_for_metric(server.health_addr, "tl_engine_queue_depth", 1)
        return await answer(server, asked.request())


async def with_too_many_headers(asked: Asked) -> RawResponse:
    async with server_with() as server:
        return await answer(server, asked.request(*["A: b"] * 101))


async def while_something_of_ours_is_broken(asked: Asked) -> RawResponse:
    def broken(raw: bytes, request_type: type) -> None:
        raise ZeroDivisionError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(body, "read", broken)
        async with server_with() as server:
            return await answer(server, asked.request())


async def with_too_many_connections(asked: Asked) -> RawResponse:
    async with server_with(max_connections=1) as server, connect(server.http_addr) as first:
        await first.request("GET", "/healthz")  # so that it is the first
        return await answer(server, asked.request())


async def in_another_version_of_http(asked: Asked) -> RawResponse:
    async with server_with() as server:
        return await answer(server, asked.request(version="HTTP/2.0"))


WAYS: dict[int, Way] = {
    200: well,
    400: with_a_host_that_is_none,
    401: without_a_key,
    404: of_another_model,
    408: with_a_body_that_does_not_come,
    413: with_a_body_that_is_too_large,
    422: with_a_field_that_is_not_served,
    429: with_a_full_queue,
    431: with_too_many_headers,
    500: while_something_of_ours_is_broken,
    503: with_too_many_connections,
    505: in_another_version_of_http,
}
PAIRS = [(method, path, int(status)) for (method, path), entry in OPERATIONS.items() for status in entry["responses"]]


def asked_of(method: str, path: str) -> Asked:
    """With the document's own first example."""
    content = OPERATIONS[method, path].get("requestBody", {}).get("content", {}).get("application/json", {})
    examples = [example["value"] for example in content.get("examples", {}).values()]
    return Asked(method, path, examples[0] if examples else None)


@pytest.mark.parametrize(("method", "path", "status"), PAIRS)
async def test_each_status_can_be_had_and_is_as_described(method: str, path: str, status: int) -> None:
    reply = await WAYS[status](asked_of(method, path))
    assert reply.status == status, reply.body
    check_answer(method, path, reply.status, dict(reply.headers), reply.body)
