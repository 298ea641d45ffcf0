"""A real Prometheus on loopback that scrapes one server every second, and promtool."""

from __future__ import annotations

import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import trio
import yaml

from tests.client import Address, get
from tests.metrics.queries import ALERTS_FILE

JOB = "trio-tlserve"
SCRAPE_INTERVAL = 1  # seconds
START_TIMEOUT = 30.0
POLL_INTERVAL = 0.05


class QueryError(Exception):
    """Prometheus has refused a query."""


@dataclass(frozen=True)
class Series:
    labels: dict[str, str]
    times: list[float]  # Unix seconds
    values: list[float]


@dataclass
class Prometheus:
    address: Address

    async def range(self, query: str, start: float, end: float) -> list[Series]:
        """The query at each second of a time. Raises QueryError."""
        data = await self.get("query_range", query=query, start=start, end=end, step=SCRAPE_INTERVAL)
        return [
            Series(found["metric"], [at for at, _ in found["values"]], [float(value) for _, value in found["values"]])
            for found in data["result"]
        ]

    async def get(self, what: str, **fields: object) -> Any:
        """The data of an answer of its API. Raises QueryError."""
        answer = (await get(self.address, f"/api/v1/{what}?{urlencode(fields)}")).json()
        if answer["status"] != "success":
            raise QueryError(f"{fields}: {answer['error']}")
        return answer["data"]


@asynccontextmanager
async def prometheus(program: Path, address: Address, target: Address, scratch: Path) -> AsyncIterator[Prometheus]:
    """Run it for the length of a block, which is entered once it answers. ``scratch`` takes its files."""
    config = {
        "global": {"scrape_interval": f"{SCRAPE_INTERVAL}s", "evaluation_interval": f"{SCRAPE_INTERVAL}s"},
        "rule_files": [str(ALERTS_FILE)],
        "scrape_configs": [{"job_name": JOB, "static_configs": [{"targets": [f"{target[0]}:{target[1]}"]}]}],
    }
    (scratch / "prometheus.yml").write_text(yaml.safe_dump(config))
    command = [
        str(program),
        f"--config.file={scratch / 'prometheus.yml'}",
        f"--storage.tsdb.path={scratch / 'data'}",
        f"--web.listen-address={address[0]}:{address[1]}",
        "--enable-feature=exemplar-storage",
        "--log.level=warn",
    ]
    process = await trio.lowlevel.open_process(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    try:
        with trio.fail_after(START_TIMEOUT):
            while not await _is_ready(address):
                assert process.returncode is None, "prometheus has ended"
                await trio.sleep(POLL_INTERVAL)
        yield Prometheus(address)
    finally:
        with trio.CancelScope(shield=True):  # SIGTERM ends it within a moment
            process.terminate()
            await process.wait()


async def _is_ready(address: Address) -> bool:
    try:
        return (await get(address, "/-/ready")).status == 200
    except OSError:
        return False


async def promtool(program: Path, *arguments: str | Path, stdin: bytes = b"") -> None:
    """Run it; its words go where ours go. Raises CalledProcessError when it finds a fault."""
    await trio.run_process([program, *arguments], stdin=stdin)
