"""A client may reset its connection at any moment: no task and no block is left, and at most one line of the log."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest
import trio

from tests.client import Address, Client, connect, wait_for_metric
from tests.test_server import SUCC
from tlserve import ServeConfig, Server, serve

COMPLETIONS = "/v1/completions"
RUNNING, QUEUED = "tl_engine_active_sequences", "tl_engine_queue_depth"
USED = 'tl_engine_kv_blocks{state="used"}'
# One request runs, one waits, one chunk of a prompt is a step: each moment lasts for as long as it is looked for.
CONFIG: dict[str, Any] = {"max_num_seqs": 1, "queue_capacity": 4, "prefill_chunk": 1, "step_delay": 0.002}


def completion(**fields: Any) -> dict[str, Any]:
    return {"model": "succ", "prompt": "a", "max_tokens": 3000} | fields


def sent(body: dict[str, Any], *, part: float = 1.0) -> bytes:
    data = json.dumps(body).encode()
    whole = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data
    return whole[: int(part * len(whole))]


async def connected(client: Client, health: Address) -> None:
    pass


async def in_the_head(client: Client, health: Address) -> None:
    await client.stream.send_all(sent(completion(), part=0.2))


async def in_the_body(client: Client, health: Address) -> None:
    await client.stream.send_all(sent(completion(), part=0.9))


async def in_prefill(client: Client, health: Address) -> None:
    await client.stream.send_all(sent(completion(prompt="a" * 1000, max_tokens=1)))
    await wait_for_metric(health, RUNNING, 1)


async def in_decode(client: Client, health: Address) -> None:
    await client.stream.send_all(sent(completion()))
    await wait_for_metric(health, RUNNING, 1)


async def in_a_stream(client: Client, health: Address) -> None:
    await client.stream.send_all(sent(completion(stream=True)))
    await client.stream.receive_some()


async def with_another_request_behind(client: Client, health: Address) -> None:
    await client.stream.send_all(2 * sent(completion()))
    await wait_for_metric(health, RUNNING, 1)


async def between_requests(client: Client, health: Address) -> None:
    await client.request("POST", COMPLETIONS, completion(max_tokens=1))


async def while_the_server_lingers(client: Client, health: Address) -> None:
    await client.stream.send_all(b"GET / HTTP/1.1\nHost: x\r\n\r\n")
    assert (await client.stream.receive_some()).startswith(b"HTTP/1.1 400 ")


MOMENTS: list[tuple[Callable[[Client, Address], Awaitable[None]], str | None]] = [
    (connected, None),
    (in_the_head, None),
    (in_the_body, None),  # a request is what has arrived
    (in_prefill, "client_left"),
    (in_decode, "client_left"),
    (in_a_stream, "client_left"),
    (with_another_request_behind, "client_left"),
    (between_requests, "complete"),
    (while_the_server_lingers, "complete"),
]


def reset(client: Client) -> None:
    client.stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.stream.socket.close()


async def wait_for_tasks(count: int) -> None:
    with trio.fail_after(10):
        while trio.lowlevel.current_statistics().tasks_living != count:  # noqa: ASYNC110 no event tells of it
            await trio.sleep(0.005)


async def reset_after(server: Server, moment: Callable[[Client, Address], Awaitable[None]]) -> None:
    num_tasks = trio.lowlevel.current_statistics().tasks_living
    async with connect(server.http_addr) as client:
        await moment(client, server.health_addr)
        reset(client)
    await wait_for_tasks(num_tasks)
    for name in (USED, RUNNING, QUEUED):
        await wait_for_metric(server.health_addr, name, 0)


@pytest.mark.parametrize(("moment", "outcome"), MOMENTS, ids=[moment.__name__ for moment, _ in MOMENTS])
async def test_a_reset_at_any_moment_leaves_nothing_but_its_line(
    moment: Callable[[Client, Address], Awaitable[None]], outcome: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "tlserve")
    async with serve(ServeConfig.for_model(SUCC, **CONFIG)) as server:
        await reset_after(server, moment)
        assert [vars(record)["outcome"] for record in caplog.records] == ([] if outcome is None else [outcome])


async def test_a_reset_while_a_request_waits_takes_it_out_of_the_queue(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "tlserve")
    async with serve(ServeConfig.for_model(SUCC, **CONFIG)) as server, AsyncExitStack() as stack:
        first = await stack.enter_async_context(connect(server.http_addr))
        await in_decode(first, server.health_addr)
        async with connect(server.http_addr) as client:
            await client.stream.send_all(sent(completion()))
            await wait_for_metric(server.health_addr, QUEUED, 1)
            reset(client)
        await wait_for_metric(server.health_addr, QUEUED, 0)
        assert [vars(record)["outcome"] for record in caplog.records] == ["client_left"]
