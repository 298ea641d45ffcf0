"""A terminal for a program: what a person would see and type."""

from __future__ import annotations

import os
import pty
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import trio

from tests.command import COMMAND, ROOT

CTRL_C, CTRL_D = "\x03", "\x04"
TIMEOUT = 60.0


@dataclass
class Screen:
    """The side of the terminal where the person sits."""

    process: trio.Process
    file: int
    seen: str = ""

    async def type(self, text: str) -> None:
        """Keys, as they are."""
        os.write(self.file, text.encode())

    async def wait_for(self, text: str) -> str:
        """All that was written up to ``text``, which is then behind us."""
        with trio.fail_after(TIMEOUT):
            while text not in self.seen:
                await trio.lowlevel.wait_readable(self.file)
                self.seen += os.read(self.file, 65_536).decode()
        before, _, self.seen = self.seen.partition(text)
        return before

    async def wait(self) -> int:
        """The exit status."""
        with trio.fail_after(TIMEOUT):
            return await self.process.wait()


@asynccontextmanager
async def on_terminal(arguments: Sequence[str], **env: str) -> AsyncIterator[Screen]:
    """Run ``trio-tlserve`` with these arguments on a terminal of its own, which sends signals as terminals do."""
    ours, theirs = pty.openpty()
    process = await trio.lowlevel.open_process(
        [*COMMAND, *arguments],
        cwd=ROOT,
        env={**os.environ, "TERM": "dumb", **env},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        preexec_fn=lambda: os.close(os.open(os.ttyname(theirs), os.O_RDWR)),  # makes it the one that Ctrl-C comes from
    )
    os.close(theirs)
    try:
        yield Screen(process, ours)
    finally:
        if process.returncode is None:
            process.kill()
        with trio.CancelScope(shield=True):
            await process.wait()
        os.close(ours)
