"""Progress: a bar where somebody can see it move, lines in a file."""

from __future__ import annotations

import io
import itertools
import time

import pytest

from tlserve.cli.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four seconds pass each time somebody looks."""
    moments = itertools.count(0, 4)
    monkeypatch.setattr(time, "monotonic", lambda: float(next(moments)))


def test_a_terminal_gets_a_bar_that_is_wiped_in_the_end() -> None:
    out = Terminal()
    with Progress("requests", 4, stream=out) as progress:
        progress.advance(2, note="99 tokens/s")
    drawn = out.getvalue().split("\r\x1b[K")
    assert drawn[2] == f"requests [{'#' * 15}{'.' * 15}] 2/4 99 tokens/s"
    assert drawn[-1] == ""


def test_a_file_gets_a_plain_line_now_and_then() -> None:
    out = io.StringIO()
    with Progress("requests", 10, stream=out) as progress:
        for _ in range(10):
            progress.advance()
    lines = out.getvalue().splitlines()
    assert 1 < len(lines) < 10
    assert lines[0].startswith("requests ")
    assert "\r" not in out.getvalue()


def test_an_unknown_total_is_not_shown() -> None:
    out = Terminal()
    with Progress("requests", None, stream=out) as progress:
        progress.advance(3)
    assert "requests 3\r" in out.getvalue()
