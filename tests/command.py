"""The real ``trio-tlserve`` in a process of its own: what it writes to stderr, and how it ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import trio

from tests.client import Address

ROOT = Path(__file__).parents[1]
SUCC = ROOT / "fixtures" / "succ"  # a byte-level bigram: after byte i comes byte i + 1
TIMEOUT = 60.0  # seconds; whatever takes longer hangs
COMMAND = (sys.executable, "-m", "tlserve")


@dataclass
class Command:
    process: trio.Process
    stderr: bytes = b""
    _arrival: trio.lowlevel.ParkingLot = field(default_factory=trio.lowlevel.ParkingLot)

    @property
    def lines(self) -> list[str]:
        return self.stderr.decode().splitlines()

    @property
    def records(self) -> list[dict[str, Any]]:
        """The log, where it is JSON: every line must be."""
        return [json.loads(line) for line in self.lines]

    async def wait_for(self, text: str) -> str:
        """The first line that holds ``text``, once it has been written whole."""
        with trio.fail_after(TIMEOUT):
            while True:
                whole = self.stderr.rpartition(b"\n")[0].decode().splitlines()
                for line in whole:
                    if text in line:
                        return line
                assert self.process.returncode is None, self.stderr.decode()
                await self._arrival.park()

    async def wait_ready(self) -> tuple[Address, Address]:
        """The addresses of the API and of health; for a log that is JSON."""
        record = json.loads(await self.wait_for('"serving"'))
        ports = record["url"].removesuffix("/v1").rsplit(":", 1)[1], record["health"].rsplit(":", 1)[1]
        return ("127.0.0.1", int(ports[0])), ("127.0.0.1", int(ports[1]))

    async def wait(self) -> int:
        """The exit status."""
        with trio.fail_after(TIMEOUT):
            return await self.process.wait()

    def send_signal(self, number: int) -> None:
        self.process.send_signal(number)

    async def read_forever(self) -> None:
        assert self.process.stderr is not None
        try:
            async for data in self.process.stderr:
                self.stderr += data
                self._arrival.unpark_all()
        except trio.ClosedResourceError:
            pass  # a test has closed it
        await self.process.wait()
        self._arrival.unpark_all()


def config_text(**values: Any) -> str:
    """A runtime.toml for the bigram on free ports, with its log in JSON."""
    table = {
        "model_dir": str(SUCC),
        "http_listen": "127.0.0.1:0",
        "health_listen": "127.0.0.1:0",
        "log_format": "json",
    } | values
    return "[engine]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in table.items())


@asynccontextmanager
async def running(arguments: Sequence[str | Path], **env: str) -> AsyncIterator[Command]:
    """Run a command line; what still runs at the end of the block is killed."""
    process = await trio.lowlevel.open_process(
        [str(argument) for argument in arguments],
        cwd=ROOT,
        env={**os.environ, **env},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    command = Command(process)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(command.read_forever)
        try:
            yield command
        finally:
            if process.returncode is None:
                process.kill()
            with trio.CancelScope(shield=True):
                await process.wait()
