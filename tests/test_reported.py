"""Faults that users reported of servers like this one, tried on the whole of ours; others are beside their parts."""

from __future__ import annotations

import base64
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio

from tests.client import connect, get, joined, post, stream_events
from tlserve import ServeConfig, SpeculativeConfig, serve

FIXTURES = Path(__file__).parents[1] / "fixtures"
SUCC, TINY = FIXTURES / "succ", FIXTURES / "tiny-llama"
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@pytest.mark.parametrize("speculative", [None, SpeculativeConfig(method="prompt_lookup")])
async def test_b062_a_stop_string_is_honoured_on_every_route_and_in_every_mode(
    speculative: SpeculativeConfig | None,
) -> None:
    """``e`` would follow ``d`` as one draft; the answer is the same text and reason everywhere."""
    fields: dict[str, Any] = {"model": "succ", "max_tokens": 12, "temperature": 0, "stop": ["de", "zz"]}
    text = "abcdefgh, a"
    messages = [{"role": "user", "content": text}]
    async with serve(ServeConfig.for_model(SUCC, speculative=speculative)) as server:
        plain = (await post(server.http_addr, CHAT, fields | {"messages": messages})).json()["choices"][0]
        assert (plain["message"]["content"], plain["finish_reason"]) == ("bc", "stop")
        events = await stream_events(server.http_addr, CHAT, fields | {"messages": messages})
        assert (joined(events), events[-2]["choices"][0]["finish_reason"]) == ("bc", "stop")
        for prompt in (text, [text, text]):
            body = fields | {"prompt": prompt}
            choices = (await post(server.http_addr, COMPLETIONS, body)).json()["choices"]
            assert [(c["text"], c["finish_reason"]) for c in choices] == [("bc", "stop")] * len(choices)
            events = await stream_events(server.http_addr, COMPLETIONS, body)
            parts = [event["choices"][0] for event in events[:-1]]
            for index in range(len(choices)):
                mine = [part for part in parts if part["index"] == index]
                assert ("".join(part["text"] for part in mine), mine[-1]["finish_reason"]) == ("bc", "stop")
        refused = await post(server.http_addr, CHAT, fields | {"messages": messages, "n": 2})
        assert refused.status == 422


@pytest.mark.parametrize("has_length", [True, False])
async def test_b097_a_body_of_a_hundred_megabytes_is_refused_and_harms_nobody(has_length: bool) -> None:
    piece = b"x" * 65_536
    async with serve(ServeConfig.for_model(SUCC)) as server, connect(server.http_addr) as client:
        framing = f"Content-Length: {100 << 20}" if has_length else "Transfer-Encoding: chunked"
        await client.stream.send_all(f"POST {CHAT} HTTP/1.1\r\nHost: x\r\n{framing}\r\n\r\n".encode())
        answer = bytearray()

        async def send() -> None:
            chunk = piece if has_length else b"10000\r\n" + piece + b"\r\n"
            for _ in range((100 << 20) // len(piece)):
                try:
                    await client.stream.send_all(chunk)
                except trio.BrokenResourceError:
                    return

        async with trio.open_nursery() as nursery:
            nursery.start_soon(send)
            with trio.fail_after(10):
                while b"\r\n\r\n" not in answer:
                    answer += await client.stream.receive_some()
            assert (await get(server.health_addr, "/healthz")).status == 200
            nursery.cancel_scope.cancel()
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"connection: close" in answer.lower()


async def test_b099_base64_is_the_same_float32_values_little_endian() -> None:
    async with serve(ServeConfig.for_model(TINY)) as server:
        vectors = {
            (form, text): (
                await post(
                    server.http_addr,
                    "/v1/embeddings",
                    {"model": "tiny-llama", "input": text, "encoding_format": form},
                )
            ).json()["data"][0]["embedding"]
            for form, text in product(("float", "base64"), ("a", "longer text"))
        }
    for text in ("a", "longer text"):
        raw = base64.b64decode(vectors["base64", text], validate=True)
        floats = np.array(vectors["float", text], np.float64)
        assert len(raw) == 4 * len(floats)
        assert np.array_equal(np.frombuffer(raw, "<f4"), floats.astype(np.float32))
        assert np.array_equal(floats.astype(np.float32).astype(np.float64), floats), "floats are exact"
