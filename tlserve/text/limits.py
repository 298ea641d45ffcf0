"""Text that cannot fit is refused before it is tokenized.

A token holds only so many bytes, so a text has at least its bytes over those of the longest token. Counted by kind of
byte the bound is sharp enough to be of use: the longest tokens are runs of spaces or dashes, while words are short.
"""

from __future__ import annotations

import string
from collections.abc import Iterable

from tlserve.errors import ContextLengthExceeded

_KINDS = (string.ascii_letters.encode(), string.digits.encode(), string.whitespace.encode(), bytes(range(128, 256)))


def check_token_limit(num_tokens: int, limit: int | None) -> None:
    """Refuse a text of at least `num_tokens` tokens where only `limit` can be read.

    Raises ContextLengthExceeded.
    """
    if limit is not None and num_tokens > limit:
        raise ContextLengthExceeded(
            f"the prompt is too long: this model's maximum context length is {limit} tokens, and it has at least "
            f"{num_tokens} tokens"
        )


def min_tokens(data: bytes, most: list[int], *, composes: bool = False) -> int:
    """A number of tokens that `data` has at least, where no token has more of any kind of byte than `most` says.

    `composes` is for tokenizers that compose characters first (NFC): that takes at most two thirds of all bytes, and
    an ASCII letter or sign only together with two bytes or more that are not ASCII.
    """
    letters, digits, spaces, others, signs, total = _counts(data)
    if composes:
        letters, others, signs, total = letters - others // 2, 0, signs - others // 2, total // 3
    counts = (letters, digits, spaces, others, signs, total)
    return max(-(-count // max(limit, 1)) for count, limit in zip(counts, most, strict=True))


def most_per_token(tokens: Iterable[bytes]) -> list[int]:
    """For each kind of byte the most that one of `tokens` has."""
    return [max(counts) for counts in zip(*map(_counts, tokens), strict=True)]


def _counts(data: bytes) -> list[int]:
    """How many bytes of each kind: letters, digits, white space, not ASCII, other signs, all."""
    counts = [len(data) - len(data.translate(None, kind)) for kind in _KINDS]
    return [*counts, len(data) - sum(counts), len(data)]
