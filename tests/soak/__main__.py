"""``make soak``: mixed traffic from good, slow, vanishing, malformed and bursty clients; exit status 1 if it hurt."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import trio

from tests.soak.run import Plan, soak
from tests.soak.server_process import ROOT


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--model", type=Path, default=ROOT / "artifacts/models/smol-135m/v3")
    parser.add_argument("--seed", type=int, default=0, help="of the order of requests and of every pause")
    arguments = parser.parse_args()
    plan = Plan(
        arguments.model,
        arguments.minutes * 60,
        warm_up=0.2,
        max_growth=0.02,
        max_health_p99=0.05,
        max_refusal_p99=0.05,
        seed=arguments.seed,
    )
    report = trio.run(soak, plan)
    print(report.text())
    return 1 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main())
