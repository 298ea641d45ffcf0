"""What happens to a request whose client has gone: its blocks are free and nothing of it runs.

The gauges must fall long before the answer would have ended by itself, else a server that goes on would pass. So the
case measures first how fast the server is, asks for long answers, and gives the gauges a fraction of their time.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import trio

from tlserve.conform.case import Cases, Failed
from tlserve.conform.cases.health import ACTIVE, QUEUED, USED
from tlserve.conform.subject import CHAT, Body, Subject

CASES = Cases("closing.md#the-endings-of-a-request")
NUM_CLIENTS = 4
NUM_PACED = 32  # tokens by which the pace is measured
LONGEST_ANSWER = 1800  # tokens, where the context has room
PATIENCE = 2.0  # seconds for the gauges to fall, where the answers would take longer than twice that
POLL_INTERVAL = 0.005  # seconds


async def _long_answers(server: Subject) -> tuple[list[Body], float]:
    """Bodies whose answers are long, and how many seconds these would take at the least; once nothing else runs."""
    while await _busy(server):  # noqa: ASYNC110 all that tells
        await trio.sleep(POLL_INTERVAL)
    num_tokens = min(await server.context() - 200, LONGEST_ANSWER)
    start = trio.current_time()
    await server.chat(max_tokens=NUM_PACED, ignore_eos=True)
    seconds = (trio.current_time() - start) / NUM_PACED * num_tokens
    bodies = [
        server.chat_body(f"Tell me story {number}.", max_tokens=num_tokens, ignore_eos=True)
        for number in range(NUM_CLIENTS)
    ]
    return bodies, seconds


async def _leave(server: Subject, bodies: Sequence[Body], *, when_active: bool) -> None:
    """Send each on a connection of its own, wait until they run where asked, and close all connections."""
    streams: list[trio.abc.Stream] = []
    try:
        for body in bodies:
            data = json.dumps(body).encode()
            head = server.head(CHAT, f"Content-Length: {len(data)}")
            streams.append(await server.opened(head + data, f"POST {CHAT}, and closed the connection"))
        while when_active and await server.gauge(ACTIVE) < len(bodies):  # noqa: ASYNC110 all that tells
            await trio.sleep(POLL_INTERVAL)
    finally:
        for stream in streams:
            await trio.aclose_forcefully(stream)


async def _busy(server: Subject) -> str:
    """The gauges that are not 0; "" when nothing runs."""
    values = {name: await server.gauge(name) for name in (ACTIVE, USED, QUEUED)}
    return ", ".join(f"{name} {value:g}" for name, value in values.items() if value)


async def _falls_idle(server: Subject, seconds: float) -> None:
    """The gauges fall to 0 within a part of the time that the answers would have taken."""
    patience = min(PATIENCE, seconds / 2)
    busy = "no answer of /metrics"
    with trio.move_on_after(patience):
        while busy := await _busy(server):  # noqa: ASYNC110 all that tells
            await trio.sleep(POLL_INTERVAL)
        return
    raise Failed(
        sent=f"{NUM_CLIENTS} POST {CHAT}, and closed their connections",
        expected=f"gauges of 0 within {patience:.2g} s",
        came=busy,
    )


@CASES.add("cancel.disconnect", "the client of a stream leaves: its blocks are free at once", needs_health=True)
async def disconnect(server: Subject) -> None:
    bodies, seconds = await _long_answers(server)
    await _leave(server, [body | {"stream": True} for body in bodies], when_active=True)
    await _falls_idle(server, seconds)


@CASES.add("cancel.nonstream", "the client of a whole answer leaves: its blocks are free at once", needs_health=True)
async def disconnect_of_whole(server: Subject) -> None:
    bodies, seconds = await _long_answers(server)
    await _leave(server, bodies, when_active=True)
    await _falls_idle(server, seconds)


@CASES.add("cancel.prefill", "a client that leaves before its first token leaves nothing behind", needs_health=True)
async def disconnect_in_prefill(server: Subject) -> None:
    bodies, seconds = await _long_answers(server)
    await _leave(server, bodies, when_active=False)
    await _falls_idle(server, seconds)


@CASES.add("cancel.others", "those who stay get their answers when others leave", needs_health=True)
async def others_stay(server: Subject) -> None:
    wanted = (await server.chat(max_tokens=64))["choices"][0]["message"]["content"].value
    bodies, _ = await _long_answers(server)
    answers = []

    async def stay() -> None:
        answers.append(await server.chat(max_tokens=64))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(stay)
        await _leave(server, bodies, when_active=False)
    answers[0]["choices"][0]["message"]["content"].equals(wanted)
