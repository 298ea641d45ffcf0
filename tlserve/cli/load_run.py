"""When requests are sent: a closed loop keeps so many in flight, an open loop sends them at a rate come what may."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import trio

from tlserve.cli.load_prompts import PROBE_WORDS, Prompts, WordCost
from tlserve.cli.load_target import Answer, Target, TargetError
from tlserve.http.client import ClientConnection, ConnectionFailed, connect

OnAnswer = Callable[[Answer], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """``rate`` requests/s make an open loop; without it ``concurrency`` workers make a closed one.

    Sending ends after ``num_requests``, or after ``duration`` seconds; what is in flight then is waited for.
    """

    max_tokens: int
    concurrency: int = 1
    rate: float | None = None
    num_requests: int | None = None
    duration: float | None = None
    seed: int = 0


async def probe(target: Target) -> WordCost:
    """Learn what a word costs, with two short requests that also warm the server up. Raises TargetError."""
    counts = []
    for num_words in PROBE_WORDS:
        answer = await _ask_anew(target, Prompts(seed=-1, num_words=num_words).text(0), max_tokens=1)
        if answer.error is not None:
            raise TargetError(f"a request of {num_words} words and 1 token failed: {answer.detail or answer.error}")
        counts.append(answer.prompt_tokens)
    return WordCost.from_probes(*counts)


async def run_load(target: Target, prompts: Prompts, plan: Plan, on_answer: OnAnswer) -> None:
    """Send everything; ``on_answer`` gets each answer as it ends, failed ones too."""
    start = trio.current_time()
    if plan.rate is None:
        indices = _indices(plan, start)
        async with trio.open_nursery() as nursery:
            for _ in range(plan.concurrency):
                nursery.start_soon(_work, target, prompts, plan, indices, on_answer)
    else:
        await _send_at(_arrivals(plan, plan.rate, start), target, prompts, plan, on_answer)


def _indices(plan: Plan, start: float) -> Iterator[int]:
    """The numbers of the requests to send, ending when no more should be."""
    for index in itertools.count():
        if plan.num_requests is not None and index >= plan.num_requests:
            return
        if plan.duration is not None and trio.current_time() >= start + plan.duration:
            return
        yield index


async def _work(target: Target, prompts: Prompts, plan: Plan, indices: Iterator[int], on_answer: OnAnswer) -> None:
    """One client of a closed loop: its next request follows its last answer, on the same connection."""
    connection: ClientConnection | None = None
    try:
        for index in indices:
            answer = Answer(start=trio.current_time())
            if connection is None or not connection.is_reusable:
                connection = await _reconnect(connection, target, answer)
            if connection is not None:
                await target.ask(connection, answer, prompts.text(index), plan.max_tokens)
            on_answer(answer)
    finally:
        if connection is not None:
            await connection.aclose()


def _arrivals(plan: Plan, rate: float, start: float) -> Iterator[tuple[int, float]]:
    """The numbers of the requests to send, and when each is due: Poisson arrivals, the first of them at once."""
    draw = random.Random(plan.seed)
    due = start
    for index in _indices(plan, start):
        if plan.duration is not None and due >= start + plan.duration:
            return
        yield index, due
        due += draw.expovariate(rate)


async def _send_at(
    arrivals: Iterator[tuple[int, float]], target: Target, prompts: Prompts, plan: Plan, on_answer: OnAnswer
) -> None:
    """An open loop. A request that could not be sent in time is still counted from when it was due."""

    async def send(index: int, start: float) -> None:
        on_answer(await _ask_anew(target, prompts.text(index), plan.max_tokens, start=start))

    async with trio.open_nursery() as nursery:
        for index, due in arrivals:
            await trio.sleep_until(due)
            nursery.start_soon(send, index, due)


async def _ask_anew(target: Target, prompt: str, max_tokens: int, *, start: float | None = None) -> Answer:
    """One request on a connection of its own."""
    answer = Answer(start=trio.current_time() if start is None else start)
    connection = await _reconnect(None, target, answer)
    if connection is not None:
        try:
            await target.ask(connection, answer, prompt, max_tokens)
        finally:
            await connection.aclose()
    return answer


async def _reconnect(old: ClientConnection | None, target: Target, answer: Answer) -> ClientConnection | None:
    """A fresh connection; None, with the failure written into ``answer``, when there is none to be had."""
    if old is not None:
        await old.aclose()
    try:
        return await connect(target.origin)
    except ConnectionFailed:
        answer.error = "connection"
        answer.end = trio.current_time()
        return None
