"""More requests than fit, on real sockets: everybody is answered or refused, and afterwards all is as it was."""

from __future__ import annotations

import math
import random
import socket
import struct
from collections import Counter
from functools import partial
from typing import Any

import pytest
import trio

from tests.client import DONE, Client, connect, joined, metric, post, wait_for_metric
from tests.test_server import SUCC
from tests.traces import Traces, wait_until_they_are
from tlserve import ServeConfig, Server, serve
from tlserve.text.chat import ChatEncoder

CHAT = "/v1/chat/completions"
RUNNING, WAITING = 2, 4
CAPACITY = RUNNING + WAITING
NUM_BURSTS = 5
NUM_REQUESTS = 20 * CAPACITY
NUM_TOKENS = 8
STEP = 0.002  # seconds, so that a burst is there before a place is free again
SMALL: dict[str, Any] = {"max_num_seqs": RUNNING, "queue_capacity": WAITING, "step_delay": STEP, "num_blocks": 64}


def chat(**fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "a"}]
    return {"model": "succ", "messages": messages, "max_tokens": NUM_TOKENS, "temperature": 0} | fields


def reset(client: Client) -> None:
    """Close with RST instead of FIN."""
    client.stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.stream.socket.close()


async def ask(server: Server, outcomes: Counter[str], draw: random.Random) -> None:
    """One client: it stays to the end of its answer, or leaves at a moment that is drawn."""
    is_stream, patience = draw.random() < 0.5, draw.choice([math.inf, math.inf, math.inf, 0.0, STEP, 10 * STEP])
    leaves_with_reset = draw.random() < 0.5
    async with connect(server.http_addr) as client:
        outcome = "left"
        with trio.move_on_after(patience):
            outcome = await _outcome(client, is_stream)
        if outcome == "left" and leaves_with_reset:
            reset(client)
        outcomes[outcome] += 1


async def _outcome(client: Client, is_stream: bool) -> str:
    if not is_stream:
        reply = await client.request("POST", CHAT, chat())
        text = reply.json()["choices"][0]["message"]["content"] if reply.status == 200 else ""
    else:
        reply = await client.start("POST", CHAT, chat(stream=True))
        events = [event async for event in client.events()] if reply.status == 200 else []
        text = joined(events)
        assert events[-1:] in ([], [DONE])
    if reply.status == 200:
        assert text == "bcdefghi"
        return "answered"
    assert reply.headers["retry-after"] == "1"
    return str(reply.status)


async def burst(server: Server, size: int, draw: random.Random) -> Counter[str]:
    outcomes: Counter[str] = Counter()
    async with trio.open_nursery() as nursery:
        for _ in range(size):
            nursery.start_soon(ask, server, outcomes, draw)
    return outcomes


async def test_twenty_times_the_capacity_in_bursts_is_answered_or_refused_and_leaves_nothing() -> None:
    draw = random.Random(5)
    async with serve(ServeConfig.for_model(SUCC, **SMALL)) as server:
        before = Traces.now()
        value = partial(metric, server.health_addr)
        num_blocks = sum([await value(f'tl_engine_kv_blocks{{state="{state}"}}') for state in ("free", "cached")])
        outcomes: Counter[str] = Counter()
        for _ in range(NUM_BURSTS):
            outcomes += await burst(server, NUM_REQUESTS // NUM_BURSTS, draw)
        assert outcomes.keys() <= {"answered", "429", "left"}
        assert outcomes.total() == NUM_REQUESTS
        assert min(outcomes["answered"], outcomes["429"], outcomes["left"]) >= NUM_BURSTS
        await wait_for_metric(server.health_addr, 'tl_engine_kv_blocks{state="used"}', 0)
        assert await value("tl_engine_queue_depth") == await value("tl_engine_active_sequences") == 0
        assert num_blocks == sum(
            [await value(f'tl_engine_kv_blocks{{state="{state}"}}') for state in ("free", "cached")]
        )
        await wait_until_they_are(before)
        assert (await post(server.http_addr, CHAT, chat())).status == 200


async def test_b028_a_burst_of_big_prompts_is_prepared_no_further_than_it_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five times the capacity together: who is refused has cost no template and no tokenizer."""
    num_encoded = 0
    encode = ChatEncoder.encode

    def counted(*args: Any, **options: Any) -> list[int]:
        nonlocal num_encoded
        num_encoded += 1
        return encode(*args, **options)

    monkeypatch.setattr(ChatEncoder, "encode", counted)
    body = chat(messages=[{"role": "user", "content": "big " * 150}], max_tokens=2000, stream=True)
    statuses: Counter[int] = Counter()
    all_known = trio.Event()

    async def ask_and_stay(server: Server) -> None:
        async with connect(server.http_addr) as client:
            with trio.CancelScope() as scope:
                staying.append(scope)
                statuses[(await client.start("POST", CHAT, body)).status] += 1
                if statuses[429] == 4 * CAPACITY:
                    all_known.set()
                await trio.sleep_forever()

    staying: list[trio.CancelScope] = []
    config = ServeConfig.for_model(SUCC, **SMALL | {"num_blocks": 1024})
    async with serve(config) as server, trio.open_nursery() as nursery:
        for _ in range(5 * CAPACITY):
            nursery.start_soon(ask_and_stay, server)
        with trio.fail_after(30):
            await all_known.wait()
        assert num_encoded == CAPACITY
        assert statuses.keys() <= {200, 429}
        nursery.cancel_scope.cancel()
