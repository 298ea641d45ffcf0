"""A minute of what ``make soak`` does for longer, on a small model."""

from __future__ import annotations

import faulthandler

from tests.soak.run import Plan, soak
from tests.soak.server_process import ROOT


async def test_a_minute_of_clients_of_every_kind_leaves_nothing_behind_and_no_answer_wrong() -> None:
    """Memory still settles in the first minute, and other work of the machine shows in the tails of /healthz and 429.

    So the bounds are wide here. What 15 minutes must keep, ``make soak`` asserts.
    """
    faulthandler.cancel_dump_traceback_later()  # the whole minute is meant
    plan = Plan(ROOT / "fixtures/tiny-llama", 30, warm_up=0.5, max_growth=0.25, max_health_p99=0.5, max_refusal_p99=0.5)
    report = await soak(plan)
    print(report.text())
    assert report.problems == []
