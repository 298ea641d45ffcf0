"""``make drain-drill``: two servers behind HAProxy are restarted in turn under constant load; no request may fail.

HAProxy runs docs/deploy/haproxy.cfg. A request has failed when it gets anything but 200 and its whole right answer.
Exit status 1 if one has.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import trio

from tests.client import Address
from tests.deploy.programs import find
from tests.deploy.proxies import CHECK_INTERVAL, Backend
from tests.deploy.proxies import haproxy as proxied
from tests.soak.clients import connected, events_in, request_bytes
from tests.soak.server_process import ROOT, ServerProcess, free_addresses, server_process
from tests.soak.workload import Case, cases, of_document, of_events

NUM_CLIENTS = 6
REQUEST_TIMEOUT = 60.0  # seconds; longer is a failure
NOTICE = 3 * CHECK_INTERVAL  # seconds until the proxy knows what a check would tell


@dataclass
class Drill:
    front: Address
    cases: list[Case]
    answers: list[object] = field(default_factory=list)
    draw: random.Random = field(default_factory=lambda: random.Random(0))
    num_answered: int = 0
    failures: list[str] = field(default_factory=list)


async def drill(haproxy: Path, model: Path, num_restarts: int) -> Drill:
    """All of it; nothing is left running."""
    (front,) = free_addresses(1)
    result = Drill(front, [case for case in cases("drill") if case.is_generation])
    addresses = free_addresses(4)
    async with AsyncExitStack() as stack:
        places = [(addresses[0], addresses[1]), (addresses[2], addresses[3])]
        servers = [await stack.enter_async_context(_started(model, *place)) for place in places]
        result.answers = [await _ask(servers[0].api, case, is_stream=False) for case in result.cases]
        backends = [Backend(server.api, server.health) for server in servers]
        async with proxied(haproxy, front, backends), trio.open_nursery() as nursery:
            load = trio.CancelScope()
            nursery.start_soon(_load, result, load)
            for number in range(num_restarts):
                place = number % 2
                status = await servers[place].stop()
                if status != 0:
                    result.failures.append(f"restart {number}: the server ended with {status}")
                servers[place] = await stack.enter_async_context(_started(model, *places[place]))
                await trio.sleep(NOTICE)
                print(
                    f"restart {number + 1}: {result.num_answered} answered, {len(result.failures)} failed", flush=True
                )
            load.cancel()
        for server in servers:
            await server.stop()
    return result


@asynccontextmanager
async def _started(model: Path, api: Address, health: Address) -> AsyncIterator[ServerProcess]:
    keys: dict[str, Any] = {"model_id": "drill", "num_blocks": 512, "max_num_seqs": 8, "threads": 1}
    async with server_process(model, api, health, **keys) as server:
        await server.wait_ready()
        yield server


async def _load(result: Drill, scope: trio.CancelScope) -> None:
    """Clients that ask again and again until ``scope`` is cancelled; requests under way then are no failures."""
    with scope:
        async with trio.open_nursery() as nursery:
            for _ in range(NUM_CLIENTS):
                nursery.start_soon(_client, result)


async def _client(result: Drill) -> None:
    while True:
        place = result.draw.randrange(len(result.cases))
        try:
            with trio.fail_after(REQUEST_TIMEOUT):
                found = await _ask(result.front, result.cases[place], is_stream=result.draw.random() < 0.5)
            if found != result.answers[place]:
                result.failures.append(f"a wrong answer: {found}, recorded is {result.answers[place]}")
        except Exception as error:
            result.failures.append(repr(error))
        result.num_answered += 1


async def _ask(address: Address, case: Case, *, is_stream: bool) -> object:
    options = {"stream": True, "stream_options": {"include_usage": True}} if is_stream else {}
    async with connected(address) as client:
        await client.send(request_bytes(case.path, case.raw(**options)))
        response = await client.response()
    if response.status != 200:
        raise AssertionError(f"{response.status} {response.body[:300]!r}")
    return of_events(case, events_in(response)) if is_stream else of_document(case, json.loads(response.body))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak.drain_drill", description=__doc__)
    parser.add_argument("--restarts", type=int, default=10)
    parser.add_argument("--model", type=Path, default=ROOT / "fixtures/tiny-llama")
    arguments = parser.parse_args()
    haproxy = find("haproxy")
    if haproxy is None:
        parser.error("haproxy is not installed; as root, make drain-drill installs Debian's package")
    result = trio.run(drill, haproxy, arguments.model, arguments.restarts)
    print(f"{arguments.restarts} restarts, {result.num_answered} requests, {len(result.failures)} failed")
    print("\n".join(result.failures[:20]))
    return 1 if result.failures or not result.num_answered else 0


if __name__ == "__main__":
    sys.exit(main())
