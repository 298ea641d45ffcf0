"""Commands started with streams that are closed or take nothing: one line and 1, or silence."""

from __future__ import annotations

import os
import subprocess
from collections.abc import AsyncIterator

import pytest
import trio

from tests.cli.fake_api import FakeApi, fake_api
from tests.command import COMMAND, ROOT

CHAT = ("chat", "--max-tokens", "1")
LOAD = ("load", "--requests", "1", "--max-tokens", "1")
LIST = ("conform", "--list")
PRINTED = [("--help",), ("--version",), ("config", "--model-dir", "fixtures/succ")]


@pytest.fixture
async def api() -> AsyncIterator[FakeApi]:
    async with fake_api() as api:
        yield api


async def run(
    api: FakeApi, arguments: tuple[str, ...], redirection: str, stdout: int = subprocess.DEVNULL
) -> tuple[int, list[str]]:
    """Exit status and the lines that are left of stderr; what is printed waits in a buffer, as it does by default."""
    script = f'echo hi | "$@" {redirection}'
    environment = {**os.environ, "OPENAI_BASE_URL": api.base_url, "PYTHONUNBUFFERED": ""}
    command = ["bash", "-o", "pipefail", "-c", script, "bash", *COMMAND, *arguments]
    ended = await trio.run_process(command, cwd=ROOT, env=environment, check=False, stdout=stdout, capture_stderr=True)
    said = ended.stderr.decode().splitlines()
    return ended.returncode, [line for line in said if not line.startswith("requests ")]


@pytest.mark.parametrize("arguments", [CHAT, LOAD, LIST, ("bench", "--help"), *PRINTED])
async def test_a_full_disk_is_said_in_a_line(api: FakeApi, arguments: tuple[str, ...]) -> None:
    expected = (1, ["trio-tlserve: stdout: No space left on device"])
    assert await run(api, arguments, ">/dev/full") == expected


@pytest.mark.parametrize("arguments", [CHAT, LOAD, LIST])
async def test_without_a_stdout_nothing_is_asked(api: FakeApi, arguments: tuple[str, ...]) -> None:
    assert await run(api, arguments, ">&-") == (1, ["trio-tlserve: stdout is closed"])
    assert api.bodies == []


@pytest.mark.parametrize("arguments", [CHAT, LOAD, LIST, ("bench", "--help"), *PRINTED])
async def test_a_reader_that_is_gone_ends_it_in_silence(api: FakeApi, arguments: tuple[str, ...]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        assert await run(api, arguments, "", stdout=writer) == (1, [])
    finally:
        os.close(writer)


@pytest.mark.parametrize("arguments", PRINTED)
async def test_without_a_stdout_nothing_is_printed(api: FakeApi, arguments: tuple[str, ...]) -> None:
    assert await run(api, arguments, ">&-") == (0, [])


async def test_without_a_stdin_there_is_no_message(api: FakeApi) -> None:
    assert await run(api, CHAT, "<&-") == (1, ["trio-tlserve chat: stdin is closed"])


@pytest.mark.parametrize("redirection", ["2>&-", "2>/dev/full"])
async def test_a_lost_stderr_is_no_reason_to_keep_an_answer(api: FakeApi, redirection: str) -> None:
    assert await run(api, CHAT, redirection) == (0, [])
