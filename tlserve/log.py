"""The log: one line a record on stderr, as text or as JSON, which nothing that a client sends can forge."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Literal

LOGGER = logging.getLogger("tlserve")
# Attributes that every record has; what is left was given as ``extra`` and belongs to the line.
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def _fields(record: logging.LogRecord) -> dict[str, object]:
    return {key: value for key, value in vars(record).items() if key not in _STANDARD}


def _printable(value: object) -> str:
    """Text that stays on its line and within its field: quoted when it holds anything but plain characters."""
    text = f"{float(f'{value:.4g}'):.15g}" if isinstance(value, float) else str(value)
    plain = text.isascii() and text.isprintable() and not set(text) & set(' "=')
    return text if plain and text else json.dumps(text)


class TextFormatter(logging.Formatter):
    """``2026-01-31T12:00:00.000+00:00 INFO message key=value ...``, a traceback indented below."""

    def format(self, record: logging.LogRecord) -> str:
        stamp = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        message = record.getMessage()
        line = " ".join(
            [stamp, record.levelname, message if message.isprintable() else json.dumps(message)]
            + [f"{key}={_printable(value)}" for key, value in _fields(record).items()]
        )
        if record.exc_info:  # indented, so that no text of an exception can pass for a line of its own
            line += "".join(f"\n  {text}" for text in self.formatException(record.exc_info).splitlines())
        return line


class JsonFormatter(logging.Formatter):
    """One JSON object a line; a traceback is its field ``exception``."""

    def format(self, record: logging.LogRecord) -> str:
        document: dict[str, object] = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            document["exception"] = self.formatException(record.exc_info)
        return json.dumps(document, default=str)


class _Stderr(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to whatever stderr is now; a lost stderr loses lines, never a request."""

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exc_info()[1], OSError | ValueError):
            super().handleError(record)


def configure(log_format: Literal["text", "json"]) -> None:
    """Send the log of this process to stderr. For the command; a program that embeds the server has its own."""
    handler = _Stderr(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    # OpenTelemetry's too, where it is used: every line of this log has the one form.
    for logger, level in ((LOGGER, logging.INFO), (logging.getLogger("opentelemetry"), logging.WARNING)):
        logger.handlers[:] = [handler]
        logger.setLevel(level)
        logger.propagate = False
