"""How much a body holds, known before it is decoded.

A decoder keeps the interpreter lock from the first byte to the last, so what it makes of a body must be little,
whatever the body's length: half a million token ids take it some 20 milliseconds, a million lists a third of a second.

Rule 1: only what is outside strings counts. Text may be as long, and have as many commas, as a body can carry.
Rule 2: marks are counted as the decoder meets them, up to the first fault of a body that is no JSON.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

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
MAX_DIGITS = 1000  # in a row; converting them to an integer takes the square of their number, and no field needs 20
SLICE_BYTES = 1 << 16  # looked at while the interpreter lock is held: well below a millisecond

_QUOTE = ord('"')
_STRIDE = MAX_DIGITS // 8
_SAMPLED_DIGITS = re.compile(rb"[0-9]{8}")  # in every byte of so many that a run of MAX_DIGITS has at least 8


def check_counts(body: bytes) -> None:
    """Raises InvalidRequest for a body with more values, keys or containers than ``LIMITS`` has."""
    if all(sum(map(body.count, _each(marks))) <= most for _, marks, most in LIMITS):
        return  # at most that many, those inside strings included
    counts = _count_outside_strings(body)
    for what, marks, most in LIMITS:
        count = int(counts[list(marks)].sum())
        if count > most:
            raise InvalidRequest(f"the body must not hold more than {most:,} {what}, got {count:,}")


def check_digits(body: bytes) -> None:
    """Raises InvalidRequest for a body with a number of more than MAX_DIGITS digits in a row."""
    if _SAMPLED_DIGITS.search(body[::_STRIDE]) and _longest_run_of_digits(body) > MAX_DIGITS:
        raise InvalidRequest(f"the body must not hold numbers of more than {MAX_DIGITS:,} digits")


def mask_escapes(body: bytes) -> bytes:
    """``body`` at the same length with no escaped quotes in it: the quotes left begin and end strings."""
    if b"\\" not in body:
        return body
    return body.replace(rb"\\", b"__").replace(rb"\"", b"__")


def _each(marks: bytes) -> list[bytes]:
    return [bytes([mark]) for mark in marks]


def _count_outside_strings(body: bytes) -> NDArray[np.intp]:
    """How often each byte stands outside strings: i64 [256]."""
    return sum((np.bincount(part, minlength=256) for part in _outside_strings(body)), np.zeros(256, np.intp))


def _longest_run_of_digits(body: bytes) -> int:
    """The most digits that follow each other outside strings."""
    longest = current = 0
    for part in _outside_strings(body):
        ends = np.flatnonzero(part - np.uint8(ord("0")) > 9)  # where there is no digit
        if len(ends):
            longest = max(longest, current + int(ends[0]), int(np.diff(ends).max(initial=1)) - 1)
            current = len(part) - 1 - int(ends[-1])
        else:
            current += len(part)
    return max(longest, current)


def _outside_strings(body: bytes) -> Iterator[NDArray[np.uint8]]:
    """The body in slices, with zeros for what is inside strings."""
    masked = mask_escapes(body)
    is_inside = np.False_
    for start in range(0, len(masked), SLICE_BYTES):
        part = np.frombuffer(masked[start : start + SLICE_BYTES], np.uint8)
        inside = np.logical_xor.accumulate(part == _QUOTE) ^ is_inside
        yield np.where(inside, np.uint8(0), part)
        is_inside = inside[-1]
