"""Text of others on a terminal: nothing in it moves the cursor, hides text or turns its direction around."""

from __future__ import annotations

import io
import os
import sys
import unicodedata
from typing import TextIO

from tlserve.errors import ExitError

# Controls, format characters (which turn direction around or take no place), line separators, half surrogate pairs.
_HIDDEN = {"Cc", "Cf", "Zl", "Zp", "Cs"}
_PLAIN = "\t\n\u200c\u200d"  # the last two join letters of Persian and of India, and emoji


class _Visible(dict[int, str | int]):
    """What each character is shown as, found out when it first comes."""

    def __missing__(self, code: int) -> str | int:
        character = chr(code)
        is_hidden = unicodedata.category(character) in _HIDDEN and character not in _PLAIN
        width, letter = (2, "x") if code < 0x100 else (4, "u") if code < 0x10000 else (8, "U")
        self[code] = shown = f"\\{letter}{code:0{width}x}" if is_hidden else code
        return shown


_VISIBLE = _Visible()

BOLD, DIM, RED = "1", "2", "31"


def visible(text: str) -> str:
    """``text`` with every control and format character spelled out, as ``\\x1b``."""
    return text.translate(_VISIBLE)


def one_line(text: str) -> str:
    """``visible``, with its white space made single spaces."""
    return visible(" ".join(text.split()))


class OutputLost(ExitError):
    """There is no stdout, or it takes nothing more."""

    exit_status = 1


def output() -> Terminal:
    """Where results go. Raises OutputLost where the command was started without it."""
    if sys.stdout is None:
        raise OutputLost("stdout is closed")
    return Terminal(sys.stdout)


class Terminal:
    """Where a command writes: on a terminal controls are made visible and colours may be used, elsewhere neither."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # not every one takes every character
        self.is_terminal = stream.isatty()
        self._has_colour = self.is_terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"

    def write(self, text: str) -> None:
        """Text of others, as it is in a file or a pipe. Raises OutputLost; BrokenPipeError when its reader is gone."""
        self._put(visible(text) if self.is_terminal else text)

    def say(self, text: str, style: str = DIM) -> None:
        """A line of ours, which may quote others. Raises as ``write`` does."""
        self._put(self.styled(visible(text), style) + "\n")

    def prompt(self, text: str) -> str:
        """For ``input``: readline is told which characters take no place."""
        return f"\x01\x1b[{BOLD}m\x02{text}\x01\x1b[0m\x02" if self._has_colour else text

    def styled(self, text: str, style: str) -> str:
        return f"\x1b[{style}m{text}\x1b[0m" if self._has_colour else text

    def _put(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except OSError as error:
            discard(self._stream)
            if isinstance(error, BrokenPipeError):
                raise
            raise OutputLost(f"{self._stream.name.strip('<>')}: {error.strerror}") from None


def discard(stream: TextIO) -> None:
    """What is still in its buffer would fail once more, and with a traceback, when the process ends."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)
