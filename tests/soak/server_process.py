"""The real server in a process of its own on known ports, its log in a file, its figures from /metrics and /proc."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trio

from tests.client import Address, get
from tlserve.config import ServeConfig

ROOT = Path(__file__).parents[2]
START_TIMEOUT = 300.0  # seconds; a first start compiles the kernels
STOP_TIMEOUT = 60.0  # longer than the drain of any configuration here
POLL_INTERVAL = 0.02
LOCALHOST = "127.0.0.1"


@dataclass(frozen=True)
class Figures:
    """What a server holds at one moment."""

    num_blocks_used: int
    num_blocks_left: int  # free or cached
    num_requests: int  # waiting or running
    num_files: int  # descriptors, sockets included
    num_threads: int

    def leaks_since(self, before: Figures) -> list[str]:
        """What has not come back to where it was; ``before`` is of a server at rest."""
        found = []
        if self.num_blocks_used or self.num_blocks_left != before.num_blocks_left:
            found.append(
                f"blocks: {self.num_blocks_used} used, {self.num_blocks_left} left of {before.num_blocks_left}"
            )
        if self.num_requests:
            found.append(f"requests: {self.num_requests} in the engine")
        if self.num_files > before.num_files:
            found.append(f"file descriptors: {self.num_files}, {before.num_files} before")
        if self.num_threads > before.num_threads:
            found.append(f"threads: {self.num_threads}, {before.num_threads} before")
        return found


@dataclass
class ServerProcess:
    process: trio.Process
    api: Address
    health: Address
    log: Path

    async def wait_ready(self) -> None:
        """Return once /readyz says so. Raises RuntimeError, with the log, when the server ends before."""
        with trio.fail_after(START_TIMEOUT):
            while not await is_ready(self.health):
                if self.process.returncode is not None:
                    raise RuntimeError(f"the server ended with {self.process.returncode}:\n{self.log.read_text()}")
                await trio.sleep(POLL_INTERVAL)

    async def stop(self) -> int:
        """Drain it; returns its exit status."""
        if self.process.returncode is None:
            self.process.send_signal(signal.SIGTERM)
        with trio.fail_after(STOP_TIMEOUT):
            return await self.process.wait()

    async def figures(self) -> Figures:
        page = (await get(self.health, "/metrics")).body.decode()
        values = {name: int(float(value)) for name, value in re.findall(r"^(tl_\S+) (\S+)$", page, re.MULTILINE)}
        blocks = {state: values[f'tl_engine_kv_blocks{{state="{state}"}}'] for state in ("free", "used", "cached")}
        return Figures(
            num_blocks_used=blocks["used"],
            num_blocks_left=blocks["free"] + blocks["cached"],
            num_requests=values["tl_engine_queue_depth"] + values["tl_engine_active_sequences"],
            num_files=len(os.listdir(f"/proc/{self.process.pid}/fd")),
            num_threads=len(os.listdir(f"/proc/{self.process.pid}/task")),
        )

    def resident_bytes(self) -> int:
        """The memory that is its own: mapped files come and go with the page cache."""
        return sum(
            int(line.split()[1]) * 1024
            for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
            if line.startswith(("RssAnon:", "RssShmem:"))
        )


async def is_ready(health: Address) -> bool:
    try:
        return (await get(health, "/readyz")).status == 200
    except OSError:
        return False


def free_addresses(count: int) -> list[Address]:
    """Loopback ports that nobody listens on, all different."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for sock in sockets:
            sock.bind((LOCALHOST, 0))
        return [(LOCALHOST, sock.getsockname()[1]) for sock in sockets]


@asynccontextmanager
async def server_process(
    model: Path, api: Address, health: Address, *, log: Path | None = None, **keys: Any
) -> AsyncIterator[ServerProcess]:
    """Run ``trio-tlserve`` for the length of a block; ``keys`` are keys of the [engine] table.

    The block is entered at once: wait for ``wait_ready``. What still runs at its end is killed.
    """
    listen = {"http_listen": f"{api[0]}:{api[1]}", "health_listen": f"{health[0]}:{health[1]}"}
    config = ServeConfig.for_model(model, **{**listen, **keys})
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "runtime.toml"
        file.write_text(config.to_toml())
        log = log or Path(scratch) / "stderr"
        with log.open("ab") as stderr:
            process = await trio.lowlevel.open_process(
                [sys.executable, "-m", "tlserve", str(file)],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
            )
        try:
            yield ServerProcess(process, api, health, log)
        finally:
            with trio.CancelScope(shield=True):  # SIGKILL needs no deadline
                if process.returncode is None:
                    process.kill()
                await process.wait()
