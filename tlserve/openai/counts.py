"""How much a body holds, known before it is decoded.

A decoder keeps the interpreter lock from the first byte to the last, so what it makes of a body must be little,
whatever the body's length: half a million token ids take it some 20 milliseconds, a million lists a third of a second.

Rule 1: only marks outside strings count. Text may be as long, and have as many commas, as a body can carry.
Rule 2: marks are counted as the decoder meets them, up to the first fault of a body that is no JSON.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tlserve.errors import InvalidRequest

# What is counted, the marks that stand for it, and the most of them. Legitimate bodies stay far below: 64 prompts of
# 8,192 token ids are half a million values, a bias for each token of a large vocabulary is 152,000 keys.
LIMITS = (
    ("lists and objects", b"[{", 50_000),
    ("keys", b":", 200_000),
    ("values", b",[{", 600_000),  # one more than commas in each list and object, an empty one as well
)
SLICE_BYTES = 1 << 16  # looked at while the interpreter lock is held: well below a millisecond

_QUOTE = ord('"')


def check_counts(body: bytes) -> None:
    """Raises InvalidRequest for a body with more values, keys or containers than ``LIMITS`` has."""
    if all(sum(map(body.count, _each(marks))) <= most for _, marks, most in LIMITS):
        return  # at most that many, those inside strings included
    counts = _count_outside_strings(mask_escapes(body))
    for what, marks, most in LIMITS:
        count = int(counts[list(marks)].sum())
        if count > most:
            raise InvalidRequest(f"the body must not hold more than {most:,} {what}, got {count:,}")


def mask_escapes(body: bytes) -> bytes:
    """``body`` at the same length with no escaped quotes in it: the quotes left begin and end strings."""
    if b"\\" not in body:
        return body
    return body.replace(rb"\\", b"__").replace(rb"\"", b"__")


def _each(marks: bytes) -> list[bytes]:
    return [bytes([mark]) for mark in marks]


def _count_outside_strings(masked: bytes) -> NDArray[np.intp]:
    """How often each byte stands outside strings: i64 [256]."""
    counts = np.zeros(256, np.intp)
    is_inside = np.False_
    for start in range(0, len(masked), SLICE_BYTES):
        part = np.frombuffer(masked[start : start + SLICE_BYTES], np.uint8)
        inside = np.logical_xor.accumulate(part == _QUOTE) ^ is_inside
        counts += np.bincount(part[~inside], minlength=256)
        is_inside = inside[-1]
    return counts
