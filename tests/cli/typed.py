"""Lines that a person types into a chat."""

from __future__ import annotations

from collections.abc import Callable


def typed(*lines: str) -> Callable[[str], str]:
    """What a session reads its lines with: these, and then the end of the input."""
    waiting = iter(lines)

    def read_line(prompt: str) -> str:
        line = next(waiting, None)
        if line is None:
            raise EOFError
        return line

    return read_line
