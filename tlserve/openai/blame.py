"""Which field is to blame for a body that cannot be decoded: what a client needs to know to mend it.

The decoder says what is wrong, and where only sometimes. So the body is cut into its top-level values, on the bytes
alone, and the first of them that cannot be decoded by itself is the one.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import islice

from tlserve.openai.counts import mask_escapes

MAX_TOKENS = 20_000  # looked at: some milliseconds, and far more than come before any fault of a client in good faith

_TOKEN = re.compile(rb'"[^"]*"|[\[\]{},:]')  # of a body whose escapes are masked


def field_at_fault(body: bytes, is_good: Callable[[bytes], bool], max_nesting: int) -> str | None:
    """The name of the first top-level field whose value is not good or nests past ``max_nesting`` levels.

    None where there is no such field, as in text that is no object at all, or none is found in MAX_TOKENS.
    """
    depth, name, start, text = 0, None, 0, b""
    for token in islice(_TOKEN.finditer(mask_escapes(body)), MAX_TOKENS):
        mark = token[0]
        if depth == 1 and name is None and mark == b":":
            name, start = text, token.end()
        elif depth == 1 and name is not None and mark in b",}":
            if not is_good(body[start : token.start()]):
                break
            name = None
        depth += mark in (b"[", b"{")
        depth -= mark in (b"]", b"}")
        if depth > max_nesting:
            break
        if depth < 1:
            return None
        text = mark
    else:
        return None
    return None if name is None else name.strip(b'"').decode(errors="replace")
