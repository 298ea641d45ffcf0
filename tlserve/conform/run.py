"""Runs cases: independent ones a few at a time, the others alone, each under a deadline of its own."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import trio

from tlserve.conform.case import Case, Failed, Skipped
from tlserve.conform.found import short
from tlserve.conform.subject import Subject, Target

NUM_AT_ONCE = 4  # few enough for a server that runs few requests at a time

Status = Literal["passed", "failed", "skipped"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    case: Case
    status: Status
    seconds: float = 0.0
    sent: str = ""  # of a failure
    expected: str = ""
    came: str = ""
    reason: str = ""  # of a skip

    @property
    def detail(self) -> str:
        """Why it did not pass, in one line."""
        return self.reason or f"sent {self.sent}; expected {self.expected}; came {self.came}"


async def run_cases(
    cases: Sequence[Case], target: Target, *, patience: float, on_result: Callable[[Result], None]
) -> list[Result]:
    """Run them all; results are in the order of ``cases``. ``on_result`` gets each as it ends."""
    results: dict[str, Result] = {}
    limiter = trio.CapacityLimiter(NUM_AT_ONCE)

    async def run(case: Case) -> None:
        async with limiter:
            result = results[case.id] = await run_case(case, target, patience)
            on_result(result)

    async with trio.open_nursery() as nursery:
        for case in cases:
            if not case.is_alone:
                nursery.start_soon(run, case)
    for case in cases:
        if case.is_alone:
            await run(case)
    return [results[case.id] for case in cases]


async def run_case(case: Case, target: Target, patience: float) -> Result:
    """One case to its end, which comes at the latest after ``patience`` seconds."""
    if case.needs_health and target.health is None:
        return Result(case=case, status="skipped", reason="needs --health-url")
    subject = Subject(target)
    start = trio.current_time()
    with trio.move_on_after(patience) as deadline:
        end = await _ended(case, subject)
    seconds = trio.current_time() - start
    if deadline.cancelled_caught:
        end = Failed(sent=subject.last_sent, expected="an end", came=f"none within {patience:g} s")
    if end is None:
        return Result(case=case, status="passed", seconds=seconds)
    if isinstance(end, Skipped):
        return Result(case=case, status="skipped", seconds=seconds, reason=str(end))
    return Result(case=case, status="failed", seconds=seconds, sent=end.sent, expected=end.expected, came=end.came)


async def _ended(case: Case, subject: Subject) -> Failed | Skipped | None:
    """How the case ended. The border that a fault of a case does not pass: the others still run."""
    try:
        await case.check(subject)
    except (Failed, Skipped) as end:
        return end
    except Exception as error:
        if lone := _lone(error):
            return lone
        where = short(" ".join(traceback.format_exception_only(error)).strip())
        return Failed(sent=subject.last_sent, expected="an answer that the case can read", came=where)
    return None


def _lone(error: BaseException) -> Failed | Skipped | None:
    """The first end among those of a case's tasks."""
    if isinstance(error, BaseExceptionGroup):
        ends = [end for end in map(_lone, error.exceptions) if end is not None]
        return ends[0] if ends else None
    return error if isinstance(error, Failed | Skipped) else None
