"""One choice of an answer: from tokens to pieces of text, with the word that ends them.

Rule 1: every token handed in is counted, and told of in exactly one piece's ``tokens`` when they are kept.
Rule 2: a piece has text, or is the last; the last has a finish_reason and may be empty.
Rule 3: the pieces joined are the text, streamed or not: both ways of answering read the same pieces.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tlserve.engine.request import FinishReason, TokenOut
from tlserve.text.text_stream import TextStream


@dataclass(frozen=True, slots=True)
class TokenAt:
    """A token and where its text begins, in code points from the start of the choice.

    The bytes of one character may come as several tokens; each of them begins where the character does.
    """

    out: TokenOut
    text_offset: int


@dataclass(frozen=True, slots=True)
class Piece:
    """Text that may be sent, and the tokens since the last piece."""

    text: str
    tokens: Sequence[TokenAt] = ()
    finish_reason: str | None = None


class Choice:
    """Follows one request of a generation."""

    def __init__(
        self,
        token_bytes: Callable[[int], bytes],
        *,
        stop: Sequence[str] = (),
        min_tokens: int = 0,
        keep_tokens: bool = False,
    ) -> None:
        """``token_bytes`` gives what a token adds to the text; ``keep_tokens`` is whether logprobs were asked for."""
        self._token_bytes = token_bytes
        self._text = DelayedStops(stop, min_tokens) if stop and min_tokens else TextStream(stop)
        self._kept: list[TokenAt] | None = [] if keep_tokens else None
        self._offsets = codecs.getincrementaldecoder("utf-8")("replace")
        self._num_chars = 0
        self.num_tokens = 0
        self.num_cached_tokens = 0
        self.finish_reason: str | None = None

    def push(self, out: TokenOut) -> Piece | None:
        """Take the next token; None while there is nothing to send. Not to be called after the last piece."""
        assert self.finish_reason is None, "the choice has ended"
        self.num_tokens += 1
        self.num_cached_tokens = max(self.num_cached_tokens, out.num_cached_tokens)
        # The token that stopped the request (EOS or a stop id) is no part of the text.
        data = b"" if out.finish is FinishReason.STOP else self._token_bytes(out.token)
        if self._kept is not None:
            self._keep(out, data)
        text = self._text.push(data)
        if out.finish is not None or self._text.stopped:
            text += self._text.finish()
            self.finish_reason = "length" if out.finish is FinishReason.LENGTH and not self._text.stopped else "stop"
        elif not text:
            return None
        return Piece(text, self._take_kept(), self.finish_reason)

    def _keep(self, out: TokenOut, data: bytes) -> None:
        assert self._kept is not None
        self._kept.append(TokenAt(out, self._num_chars))
        self._num_chars += len(self._offsets.decode(data))

    def _take_kept(self) -> Sequence[TokenAt]:
        if not self._kept:
            return ()
        kept, self._kept = self._kept, []
        return kept


class DelayedStops:
    """A TextStream that neither looks for stop strings nor holds text back in the first ``num_free`` tokens."""

    def __init__(self, stop: Sequence[str], num_free: int) -> None:
        self._characters = TextStream()
        self._matching = TextStream(stop)
        self._num_free = num_free

    @property
    def stopped(self) -> bool:
        return self._matching.stopped

    def push(self, data: bytes) -> str:
        text = self._characters.push(data)
        if self._num_free > 0:
            self._num_free -= 1
            return text
        return self._matching.push(text.encode())

    def finish(self) -> str:
        return self._matching.push(self._characters.finish().encode()) + self._matching.finish()
