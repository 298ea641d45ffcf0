"""Text of others on a terminal: nothing in it moves the cursor, hides text or turns its direction around."""

from __future__ import annotations

import io
import os
from typing import TextIO

# C0 but tab and newline, DEL and C1, marks that reorder what is around them, halves of a surrogate pair.
_CONTROLS = {*range(0x20), *range(0x7F, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A)} - {0x09, 0x0A}
_VISIBLE = {code: f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" for code in _CONTROLS}
_VISIBLE |= {code: f"\\u{code:04x}" for code in range(0xD800, 0xE000)}

BOLD, DIM, RED = "1", "2", "31"


def visible(text: str) -> str:
    """``text`` with every control character spelled out, as ``\\x1b``."""
    return text.translate(_VISIBLE)


def one_line(text: str) -> str:
    """``visible``, with its white space made single spaces."""
    return visible(" ".join(text.split()))


class Terminal:
    """Where a command writes: on a terminal controls are made visible and colours may be used, elsewhere neither."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # not every one takes every character
        self.is_terminal = stream.isatty()
        self._has_colour = self.is_terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"

    def write(self, text: str) -> None:
        """Text of others, as it is in a file or a pipe."""
        self._stream.write(visible(text) if self.is_terminal else text)
        self._stream.flush()

    def say(self, text: str, style: str = DIM) -> None:
        """A line of ours, which may quote others."""
        self._stream.write(self.styled(visible(text), style) + "\n")
        self._stream.flush()

    def prompt(self, text: str) -> str:
        """For ``input``: readline is told which characters take no place."""
        return f"\x01\x1b[{BOLD}m\x02{text}\x01\x1b[0m\x02" if self._has_colour else text

    def styled(self, text: str, style: str) -> str:
        return f"\x1b[{style}m{text}\x1b[0m" if self._has_colour else text
