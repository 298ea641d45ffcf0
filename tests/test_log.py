"""The log: one line a record, whatever a client sent."""

from __future__ import annotations

import io
import json
import logging
import sys

import pytest

from tlserve import log


def record(message: str, *, exc: BaseException | None = None, **extra: object) -> logging.LogRecord:
    made = logging.LogRecord("tlserve", logging.INFO, "f", 1, message, (), (type(exc), exc, None) if exc else None)
    vars(made).update(extra)
    return made


def test_a_text_line_has_time_level_message_and_fields() -> None:
    line = log.TextFormatter().format(record("request", route="/v1/models", status=200, seconds=0.25))
    stamp, rest = line.split(" ", 1)
    assert stamp.endswith("+00:00")
    assert rest == "INFO request route=/v1/models status=200 seconds=0.25"


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.000492913, "0.0004929"), (12.34567, "12.35"), (86400.5, "86400"), (0.0, "0"), (1e-7, "1e-07")],
)
def test_a_number_has_four_digits_that_mean_something(value: float, text: str) -> None:
    assert log.TextFormatter().format(record("request", seconds=value)).endswith(f" seconds={text}")


@pytest.mark.parametrize("hostile", ["a\n2026 INFO forged", "a b=c", "\x1b[31m", "", 'q"uote', "\u2028", "a\rb"])
def test_no_value_leaves_its_line_or_its_field(hostile: str) -> None:
    line = log.TextFormatter().format(record("request", id=hostile, status=200))
    assert line.isprintable()
    assert line.endswith(f"id={json.dumps(hostile)} status=200")
    document = json.loads(log.JsonFormatter().format(record("request", id=hostile)))
    assert document["id"] == hostile


def test_no_text_of_an_exception_starts_a_line() -> None:
    fault = ValueError("bad\n2026-01-01 INFO forged\r\u2028forged")
    lines = log.TextFormatter().format(record("fault", exc=fault)).split("\n")
    assert len(lines) > 1
    assert all(line.startswith("  ") for line in lines[1:])
    assert "ValueError" in json.loads(log.JsonFormatter().format(record("fault", exc=fault)))["exception"]


def test_opentelemetry_writes_lines_of_the_same_form(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for logger in (log.LOGGER, logging.getLogger("opentelemetry")):
        for name in ("handlers", "propagate", "level"):
            monkeypatch.setattr(logger, name, getattr(logger, name))
    log.configure("json")
    logging.getLogger("opentelemetry.sdk.trace").warning("a %s", "fault")
    assert json.loads(capsys.readouterr().err)["message"] == "a fault"


def test_a_lost_stderr_loses_lines_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    for logger in (log.LOGGER, logging.getLogger("opentelemetry")):
        monkeypatch.setattr(logger, "handlers", [])
        monkeypatch.setattr(logger, "propagate", True)
        monkeypatch.setattr(logger, "level", logger.level)
    log.configure("text")
    log.LOGGER.info("before")
    stream.close()
    log.LOGGER.info("after")
    assert stream.closed
