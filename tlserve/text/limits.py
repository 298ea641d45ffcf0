"""The one rule on the length of text: what cannot fit is refused before the work."""

from __future__ import annotations

from tlserve.errors import ContextLengthExceeded


def check_token_limit(num_tokens: int, limit: int | None) -> None:
    """Refuse a text of at least `num_tokens` tokens where only `limit` can be read.

    Raises ContextLengthExceeded.
    """
    if limit is not None and num_tokens > limit:
        raise ContextLengthExceeded(
            f"the model's context is {limit} tokens, but the prompt has at least {num_tokens} tokens"
        )
