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
    """Two seconds pass each time somebody looks."""
    moments = itertools.count(0, 2)
    monkeypatch.setattr(time, "monotonic", lambda: float(next(moments)))


def test_a_terminal_gets_a_bar_that_is_wiped_in_the_end() -> None:
    out = Terminal()
    with Progress(out) as progress:
        progress("requests", 0, 2)
        progress.advance("99 tokens/s")
    drawn = out.getvalue().split("\r\x1b[K")
    assert drawn[2] == f"requests [{'#' * 15}{'.' * 15}] 50 % 2.0 s 99 tokens/s"
    assert drawn[-1] == ""


def test_a_bar_that_is_wiped_comes_back_only_when_there_is_more_to_show() -> None:
    out = Terminal()
    with Progress(out) as progress:
        progress("weights", 10, 10)
        progress.close()
        wiped = out.getvalue()
    assert wiped.endswith("\r\x1b[K")
    assert out.getvalue() == wiped


def test_a_file_gets_each_stage_at_its_start_and_then_a_plain_line_now_and_then() -> None:
    out = io.StringIO()
    with Progress(out) as progress:
        progress("kernels", 0, 40)
        progress("requests", 0, 10)
        for _ in range(6):
            progress.advance("fine")
    assert out.getvalue().splitlines() == ["kernels ...", "requests ...", "requests 3/10 fine", "requests 6/10 fine"]


def test_an_unknown_total_is_not_shown() -> None:
    out = Terminal()
    with Progress(out) as progress:
        progress("requests", 2, None)
        progress.advance()
    assert "requests 3\r" in out.getvalue()
