"""A run: record the answers, warm up, let everybody at it, wait until all is quiet, judge.

What is promised afterwards: no answer differs from the recorded one; nothing happened to a client that must not;
blocks, requests, descriptors and threads are where they were; memory has not grown; /healthz has answered all the time
and every refusal was quick; the server drains and ends with status 0, with no traceback in its log.
"""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import trio

from tests.soak import clients, hostile
from tests.soak.clients import SLOW_SENDER, Rig, WrongAnswer, connected, events_in, request_bytes
from tests.soak.server_process import Figures, ServerProcess, free_addresses, server_process
from tests.soak.tally import percentile
from tests.soak.workload import cases, of_document, of_events

Kind = Callable[[Rig], Awaitable[str]]
# How many of each kind are at it at once, and how many seconds each of them rests between two exchanges, on average.
CROWD: dict[Kind, tuple[int, float]] = {
    clients.plain: (3, 0.1),
    clients.streaming: (3, 0.1),
    clients.slow_reader: (1, 0.5),
    clients.slow_sender: (2, 0.5),
    clients.burst: (1, 3.0),
    clients.idle_keep_alive: (2, 0.1),
    clients.pipelining: (1, 0.5),
    clients.operator: (1, 0.5),
    hostile.malformed_http: (1, 0.1),
    hostile.malformed_json: (1, 0.1),
    hostile.stalled_head: (1, 0.5),
    hostile.stalled_body: (1, 0.5),
    hostile.silent: (1, 0.5),
    hostile.vanish_at_once: (1, 0.2),
    hostile.vanish_in_prefill: (1, 0.5),
    hostile.vanish_in_decode: (2, 0.3),
    hostile.stops_reading: (1, 0.5),
    hostile.flood_of_connections: (1, 2.0),
}
MAX_EXCHANGES = 100_000  # of one client
EXCHANGE_TIMEOUT = 90.0  # seconds; an exchange that takes longer hangs
THREAD_REST = 11.0  # seconds after which a worker thread without work has ended
QUIET_TIMEOUT = 30.0  # seconds until everything must have come back
SEND_TIMEOUT, IDLE_TIMEOUT = 2.0, 2.0
# Small, so that requests wait, are refused and are preempted, and every block is used during the warm-up.
SERVER_KEYS: dict[str, Any] = {
    "num_blocks": 192,
    "max_num_seqs": 6,
    "queue_capacity": 10,
    "queue_deadline_ms": 5_000,
    "max_body_bytes": 200_000,
    "header_timeout_ms": int(SEND_TIMEOUT * 1000),
    "body_timeout_ms": int(SEND_TIMEOUT * 1000),
    "idle_timeout_ms": int(IDLE_TIMEOUT * 1000),
    "write_timeout_ms": 5_000,
    "log_format": "json",
}


@dataclass
class Plan:
    model: Path
    seconds: float  # of traffic, warm-up included
    warm_up: float  # share of it
    max_growth: float  # of memory after the warm-up
    max_health_p99: float  # seconds
    max_refusal_p99: float  # seconds on the server, from a request's first byte to the last of its 429
    seed: int = 0


@dataclass
class Report:
    rig: Rig
    health_seconds: list[float] = field(default_factory=list)
    refusal_seconds: list[float] = field(default_factory=list)  # on the server, by its log
    growth: float = 0.0
    resident_bytes: int = 0
    leaks: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)  # what breaks a promise; a run is good without any

    def text(self) -> str:
        tally = self.rig.tally
        lines = [
            tally.table(),
            "",
            f"wrong answers          {len(tally.wrong)}",
            f"faults                 {len(tally.faults)}",
            f"leaks                  {'; '.join(self.leaks) or 0}",
            f"memory                 {self.resident_bytes / 1e6:.1f} MB, grown by {self.growth:+.2%} since the warm-up",
            f"/healthz               {_milliseconds(self.health_seconds)}",
            f"429 on the server      {_milliseconds(self.refusal_seconds)}",
            f"429 for the client     {_milliseconds(tally.refusal_seconds)}",
        ]
        return "\n".join([*lines, *(f"PROBLEM: {problem[:2000]}" for problem in self.problems)])


async def soak(plan: Plan) -> Report:
    """Run a plan against a server of its own, which has ended when this returns."""
    api, health = free_addresses(2)
    model_id = "soak"
    rig = Rig(api, health, cases(model_id), random.Random(plan.seed), SEND_TIMEOUT, IDLE_TIMEOUT)
    report = Report(rig)
    async with server_process(plan.model, api, health, model_id=model_id, **SERVER_KEYS) as server:
        await server.wait_ready()
        await _record(rig)
        await trio.sleep(THREAD_REST)
        before = await server.figures()  # with the threads that a tokenizer's first long text starts for good
        async with _health_watched(report):
            await _traffic(plan, rig, server, report)
        report.leaks = await _leaks(server, before)
        status = await server.stop()
        log = server.log.read_text(errors="replace")
    report.refusal_seconds = _refusal_seconds(log)
    _judge(plan, report, status, log)
    return report


async def _record(rig: Rig) -> None:
    """The answers one by one; each is asked for twice, the second time as a stream where there is one."""
    for place, case in enumerate(rig.cases):
        async with connected(rig.api) as client:
            await client.send(request_bytes(case.path, case.raw()))
            response = await client.response()
            assert response.status == 200, response
            rig.answers.append(of_document(case, json.loads(response.body)))
            if case.is_generation:
                options = {"stream": True, "stream_options": {"include_usage": True}}
                await client.send(request_bytes(case.path, case.raw(**options)))
                rig.check(place, of_events(case, events_in(await client.response())))


async def _traffic(plan: Plan, rig: Rig, server: ServerProcess, report: Report) -> None:
    """Everybody at it until the time is over, while memory is sampled."""
    until = trio.current_time() + plan.seconds
    warm = trio.current_time() + plan.seconds * plan.warm_up
    samples: list[int] = []
    async with trio.open_nursery() as nursery:
        for kind, (number, rest) in CROWD.items():
            for _ in range(number):
                nursery.start_soon(_work, rig, kind, rest, until)
        await trio.sleep_until(warm)
        while trio.current_time() < until:
            samples.append(server.resident_bytes())
            await trio.sleep(0.25)
    share = max(len(samples) // 10, 1)
    first, last = statistics.median(samples[:share]), statistics.median(samples[-share:])
    report.resident_bytes, report.growth = int(last), last / first - 1


async def _work(rig: Rig, kind: Kind, rest: float, until: float) -> None:
    """One client: exchange after exchange until the time is over."""
    name = kind.__name__.replace("_", " ")
    for _ in range(MAX_EXCHANGES):
        await trio.sleep(rig.draw.expovariate(1 / rest))
        if trio.current_time() >= until:
            return
        try:
            with trio.fail_after(EXCHANGE_TIMEOUT):
                outcome = await kind(rig)
        except* WrongAnswer as group:
            rig.tally.wrong += [f"{name}: {error}" for error in group.exceptions]
            outcome = "WRONG ANSWER"
        except* Exception as group:
            rig.tally.faults.append(f"{name}: {group.exceptions!r}")
            outcome = "FAULT"
        rig.tally.outcomes[name, outcome] += 1


@asynccontextmanager
async def _health_watched(report: Report) -> AsyncIterator[None]:
    command = [sys.executable, str(Path(__file__).with_name("health_probe.py")), str(report.rig.health[1])]
    process = await trio.lowlevel.open_process(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield
        await process.stdin.aclose()
        with trio.fail_after(QUIET_TIMEOUT):
            seen = json.loads(b"".join([data async for data in process.stdout]))
        report.health_seconds = seen["seconds"]
        if seen["num_failed"]:
            report.problems.append(f"/healthz failed {seen['num_failed']} times")
    finally:
        with trio.CancelScope(shield=True):  # SIGKILL needs no deadline
            if process.returncode is None:
                process.kill()
            await process.wait()


async def _leaks(server: ServerProcess, before: Figures) -> list[str]:
    """What has not come back in time."""
    leaks: list[str] = []
    with trio.move_on_after(QUIET_TIMEOUT):
        while leaks := (await server.figures()).leaks_since(before):  # noqa: ASYNC110 the page is all there is to watch
            await trio.sleep(0.25)
    return leaks


def _refusal_seconds(log: str) -> list[float]:
    """How long the server had each request that it refused with 429."""
    records = [json.loads(line) for line in log.splitlines() if '"status": 429' in line]
    return [record["seconds"] for record in records if record["id"] != SLOW_SENDER]


def _judge(plan: Plan, report: Report, status: int, log: str) -> None:
    tally = report.rig.tally
    report.problems += tally.wrong + tally.faults + [f"leaked {leak}" for leak in report.leaks]
    if not any(outcome.startswith("right") for _, outcome in tally.outcomes):
        report.problems.append("nobody got an answer")
    if report.growth > plan.max_growth:
        report.problems.append(f"memory grew by {report.growth:.2%}, more than {plan.max_growth:.2%}")
    for what, seconds, most in (
        ("/healthz", report.health_seconds, plan.max_health_p99),
        ("a 429", report.refusal_seconds, plan.max_refusal_p99),
    ):
        if (p99 := percentile(seconds, 0.99)) > most:
            report.problems.append(f"{what} took {p99 * 1000:.0f} ms at p99, more than {most * 1000:.0f}")
    if status != 0:
        report.problems.append(f"the server ended with {status}")
    if "Traceback" in log:
        report.problems.append("a traceback in the log: " + log[log.index("Traceback") :])


def _milliseconds(seconds: list[float]) -> str:
    if not seconds:
        return "none"
    p50, p99, most = (percentile(seconds, share) * 1000 for share in (0.5, 0.99, 1.0))
    return f"{len(seconds)} times, p50 {p50:.1f} ms, p99 {p99:.1f} ms, at most {most:.1f} ms"
