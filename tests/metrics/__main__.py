"""``make metrics``: dashboard and alerts against a real Prometheus, and the picture of docs/metrics.md.

promtool checks the alerts and runs their tests; then a Prometheus scrapes a server under load, and each query of the
dashboard, of the alerts and of docs/metrics.md must bring data. Exit status 1 if one does not.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trio

from tests.client import get
from tests.deploy.programs import find
from tests.metrics.load import Load
from tests.metrics.picture import Line, draw
from tests.metrics.prometheus import JOB, Prometheus, QueryError, Series, prometheus, promtool
from tests.metrics.queries import ALERTS, ALERTS_FILE, DOCS, PANELS, Query, all_queries, operands, panel_queries
from tests.soak.server_process import ServerProcess, free_addresses, server_process
from tlserve.config import default_model_id

PICTURE = DOCS / "pictures" / "metrics.png"
RATE_INTERVAL = "10s"  # what Grafana would put in for scrapes this close
SETTLE_TIME = 3.0  # seconds for the last scrape and the last rules
EXEMPLARS = "tl_engine_time_to_first_token_seconds_bucket"
# Small, so that requests wait, are refused and preempted, and with speculation, so that all of it can be seen.
SERVER_KEYS: dict[str, Any] = {
    "num_blocks": 64,
    "max_num_seqs": 8,
    "queue_capacity": 8,
    "queue_deadline_ms": 1_000,
    "speculative": {"method": "prompt_lookup"},
}


@dataclass
class Scrape:
    """What a Prometheus has of one server under load."""

    prometheus: Prometheus
    start: float  # Unix seconds
    end: float

    async def find(self, query: Query) -> list[Series]:
        text = query.text.replace("$__rate_interval", RATE_INTERVAL).replace("$instance", ".*")
        return await self.prometheus.range(text, self.start, self.end)

    async def faults(self) -> list[str]:
        """The queries without data, the rules with a fault, and exemplars if there are none."""
        faults = []
        for query in all_queries():
            for part in operands(query):
                try:
                    found = await self.find(part)
                except QueryError as error:
                    faults.append(f"{query.source}: {error}")
                else:
                    if not any(math.isfinite(value) for series in found for value in series.values):
                        faults.append(f"{query.source}: no data for {part.text}")
        groups = (await self.prometheus.get("rules"))["groups"]
        rules = [rule for group in groups for rule in group["rules"]]
        faults += [f"{rule['name']}: {rule.get('lastError')}" for rule in rules if rule["health"] != "ok"]
        if len(rules) != len(ALERTS):
            faults.append(f"Prometheus has {len(rules)} of {len(ALERTS)} alerts")
        fields = {"query": EXEMPLARS, "start": self.start, "end": self.end}
        if not await self.prometheus.get("query_exemplars", **fields):
            faults.append("no exemplars")
        return faults

    async def draw(self, title: str, file: Path) -> None:
        panels = [(panel, await self._lines(panel)) for panel in PANELS if panel["type"] == "timeseries"]
        draw(title, panels, file)

    async def _lines(self, panel: dict[str, Any]) -> list[Line]:
        return [Line.of(query.legend, series) for query in panel_queries(panel) for series in await self.find(query)]


async def check(prometheus_program: Path, promtool_program: Path, model: Path, seconds: float, file: Path) -> list[str]:
    """All of it; nothing is left running. Returns what is wrong."""
    await promtool(promtool_program, "check", "rules", ALERTS_FILE)
    await promtool(promtool_program, "test", "rules", Path(__file__).with_name("alerts.test.yaml"))
    api, health, address = free_addresses(3)
    with tempfile.TemporaryDirectory() as scratch:
        async with server_process(model, api, health, **SERVER_KEYS) as server:
            await server.wait_ready()
            async with prometheus(prometheus_program, address, health, Path(scratch)) as running:
                began = time.time()
                await Load(api, default_model_id(model), seconds).run()
                await trio.sleep(SETTLE_TIME)
                await _check_page(promtool_program, server)
                scrape = Scrape(running, began, time.time())
                await scrape.draw(f"{JOB}: {seconds:g} s of clients that come and go, {default_model_id(model)}", file)
                return await scrape.faults()


async def _check_page(program: Path, server: ServerProcess) -> None:
    await promtool(program, "check", "metrics", stdin=(await get(server.health, "/metrics")).body)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.metrics", description=__doc__)
    parser.add_argument("--seconds", type=float, default=120, help="of load")
    parser.add_argument("--model", type=Path, default=Path("artifacts/models/smol-135m/v3"))
    parser.add_argument("--picture", type=Path, default=PICTURE, help="where to draw the panels")
    arguments = parser.parse_args()
    programs = find("prometheus"), find("promtool")
    if programs[0] is None or programs[1] is None:
        parser.error("this needs prometheus and promtool: Debian's package prometheus has both")
    faults = trio.run(check, programs[0], programs[1], arguments.model, arguments.seconds, arguments.picture)
    print("\n".join(faults) or f"every query has data; {arguments.picture} is drawn")
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
