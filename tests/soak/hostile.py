"""Clients who vanish, stall, break the protocol or send nonsense: each meets its end, and nobody else notices.

The two rules of clients.py hold here as well.
"""

from __future__ import annotations

import contextlib
import json
import socket
import struct

import trio

from tests.http.client import RawClient
from tests.soak.clients import Rig, connected, request_bytes
from tests.soak.workload import CHAT, COMPLETIONS, DETOKENIZE, EMBEDDINGS, TOKENIZE

GRACE = 5.0  # seconds past a deadline until its end is overdue
LONG_PROMPT = "A prompt that takes some steps to read. " * 80
HOST = b"Host: soak\r\n"

MALFORMED_HTTP: list[tuple[bytes, int]] = [
    (b"GET /healthz HTTP/1.1\r\n\r\n", 400),
    (b"GET /healthz HTTP/1.1\n\n", 400),
    (b"GET /healthz HTTP/3.0\r\n" + HOST + b"\r\n", 505),
    (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),
    (b"POST /v1/completions HTTP/1.1\r\n" + HOST + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}}", 400),
    (b"POST /v1/completions HTTP/1.1\r\n" + HOST + b"Content-Length: -1\r\n\r\n", 400),
    (b"POST /v1/completions HTTP/1.1\r\n" + HOST + b"Content-Length: 99999999999999\r\n\r\n", 413),
    (
        b"POST /v1/completions HTTP/1.1\r\n"
        + HOST
        + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        400,
    ),
    (b"POST /v1/completions HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", 400),
    (b"POST /v1/completions HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: gzip\r\n\r\n", 400),
    (b"GET /healthz HTTP/1.1\r\n" + HOST + b"X: a\r\n folded\r\n\r\n", 400),
    (b"GET /healthz HTTP/1.1\r\n" + HOST + b"X : a\r\n\r\n", 400),
    (b"GET /healthz HTTP/1.1\r\n" + HOST + b"X: " + b"a" * 20_000 + b"\r\n\r\n", 431),
    (b"GET /%zz HTTP/1.1\r\n" + HOST + b"\r\n", 400),
]
MALFORMED_JSON: list[tuple[str, bytes, int]] = [
    (CHAT, b"", 400),
    (CHAT, b"{", 400),
    (CHAT, b"[" * 100_000, 400),
    (CHAT, b'{"model":MODEL,"messages":[]}', 400),
    (CHAT, b'{"model":MODEL,"messages":[{"role":"user","content":"\\ud83d"}],"stream":true}', 400),
    (CHAT, b'{"model":MODEL,"messages":[{"role":"user","content":"a"}],"temperature":NaN,"stream":true}', 400),
    (CHAT, b'{"model":MODEL,"messages":[{"role":"user","content":"a"}],"max_tokens":1e9,"stream":true}', 400),
    (CHAT, b'{"model":MODEL,"messages":[{"role":"user","content":[]}]}', 422),
    (COMPLETIONS, b'{"model":"nobody","prompt":"a"}', 404),
    (COMPLETIONS, b'{"model":MODEL,"prompt":[1,999999999]}', 400),
    (COMPLETIONS, b'{"model":MODEL,"prompt":"a","logit_bias":{"0":1e400}}', 400),
    (EMBEDDINGS, b'{"model":MODEL,"input":["a",""]}', 400),
    (TOKENIZE, b'{"model":MODEL,"text":5}', 400),
    (DETOKENIZE, b'{"model":MODEL,"tokens":[-1]}', 400),
]


async def malformed_http(rig: Rig) -> str:
    """One refusal, and the end of the connection."""
    data, status = rig.draw.choice(MALFORMED_HTTP)
    async with connected(rig.api) as client:
        await client.send(data)
        await _expect_refusal(client, status)
    return f"{status}, then closed"


async def malformed_json(rig: Rig) -> str:
    """A refusal in JSON, and a connection that goes on. A full server does not look into a body, and says 429."""
    async with connected(rig.api) as client:
        for path, raw, status in rig.draw.choices(MALFORMED_JSON, k=3):
            body = raw.replace(b"MODEL", json.dumps(rig.cases[0].body["model"]).encode())
            await client.send(request_bytes(path, body))
            response = await client.response()
            if response.status not in (status, 429) or json.loads(response.body)["error"].keys() != {
                "message",
                "type",
                "param",
                "code",
            }:
                raise AssertionError(f"{body[:200]!r} got {response.status} {response.body[:200]!r}")
    return "refused"


async def stalled_head(rig: Rig) -> str:
    """Half a head, and then nothing."""
    async with connected(rig.api) as client:
        await client.send(b"POST /v1/completions HTTP/1.1\r\nHost: so")
        with trio.fail_after(rig.send_timeout + GRACE):
            await _expect_refusal(client, 408)
    return "408, then closed"


async def stalled_body(rig: Rig) -> str:
    async with connected(rig.api) as client:
        await client.send(request_bytes(CHAT, b"x" * 100)[:-50])
        with trio.fail_after(rig.send_timeout + GRACE):
            await _expect_refusal(client, 408)
    return "408, then closed"


async def silent(rig: Rig) -> str:
    """Connects and says nothing."""
    async with connected(rig.api) as client:
        with trio.fail_after(rig.send_timeout + GRACE):
            rest = await client.rest()
    if rest:
        raise AssertionError(f"silence was answered with {rest!r}")
    return "closed"


async def vanish_at_once(rig: Rig) -> str:
    """Gone before the request can run: as a rule while it waits."""
    return await _vanish(rig, rig.cases[rig.pick(generation=True)].raw(stream=rig.draw.random() < 0.5), after=0.0)


async def vanish_in_prefill(rig: Rig) -> str:
    body = {"model": rig.cases[0].body["model"], "max_tokens": 100, "prompt": f"{rig.draw.random()} {LONG_PROMPT}"}
    raw = json.dumps(body | {"stream": rig.draw.random() < 0.5}).encode()
    return await _vanish(rig, raw, after=rig.draw.uniform(0.001, 0.1), path=COMPLETIONS)


async def vanish_in_decode(rig: Rig) -> str:
    """Reads some events of an answer that would go on."""
    body = {"model": rig.cases[0].body["model"], "prompt": "On and on", "max_tokens": 400, "ignore_eos": True}
    async with connected(rig.api) as client:
        await client.send(request_bytes(COMPLETIONS, json.dumps(body | {"stream": True}).encode()))
        _, status, _ = await client.response_head()
        if status != 200:
            return f"refused with {status}"
        for _ in range(rig.draw.randint(1, 10)):
            await client.until(b"\n\n")
        return await _leave(rig, client)


async def stops_reading(rig: Rig) -> str:
    """Takes the head of a stream and no more, for a while."""
    raw = rig.cases[rig.pick(generation=True)].raw(stream=True)
    async with connected(rig.api) as client:
        await client.send(request_bytes(CHAT, raw))
        await client.response_head()
        await trio.sleep(rig.draw.uniform(0, 3))
        return await _leave(rig, client)


async def flood_of_connections(rig: Rig) -> str:
    """Opens many and drops them."""
    for _ in range(30):
        with contextlib.suppress(OSError):
            async with connected(rig.api) as client:
                await _leave(rig, client)
    return "dropped"


async def _vanish(rig: Rig, body: bytes, *, after: float, path: str = CHAT) -> str:
    async with connected(rig.api) as client:
        await client.send(request_bytes(path, body))
        await trio.sleep(after)
        return await _leave(rig, client)


async def _leave(rig: Rig, client: RawClient) -> str:
    """Close, or reset: what the kernel sends when it has to forget a socket at once."""
    stream = client.stream
    assert isinstance(stream, trio.SocketStream)
    is_reset = rig.draw.random() < 0.5
    if is_reset:
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    await trio.aclose_forcefully(stream)
    return "reset" if is_reset else "closed"


async def _expect_refusal(client: RawClient, status: int) -> None:
    """One answer with that status, and nothing after it."""
    response = await client.response()
    if response.status != status or response.header("connection") != "close":
        raise AssertionError(f"expected {status} and close, got {response}")
    if rest := await client.rest():
        raise AssertionError(f"something came after a fault: {rest!r}")
