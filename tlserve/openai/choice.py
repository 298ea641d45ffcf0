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

    The bytes of one character may come as several tokens; each of them begins where the character does, and none
    begins in a character that it cuts off.
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
        self._offsets = Offsets()
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
            self._kept.append(TokenAt(out, self._offsets.push(data, is_last=out.finish is not None)))
        text = self._text.push(data)
        if out.finish is not None or self._text.stopped:
            text += self._text.finish()
            self.finish_reason = "length" if out.finish is FinishReason.LENGTH and not self._text.stopped else "stop"
        elif not text:
            return None
        return Piece(text, self._take_kept(), self.finish_reason)

    def _take_kept(self) -> Sequence[TokenAt]:
        if not self._kept:
            return ()
        kept, self._kept = self._kept, []
        return kept


class Offsets:
    """Where the text of each token begins, in code points."""

    def __init__(self) -> None:
        self._decoder = _text_decoder()
        self._num_chars = 0  # whole ones

    def push(self, data: bytes, *, is_last: bool) -> int:
        """The place of the next token, which adds ``data``."""
        if not data:
            # A character that is cut off by the end stands before what ends it.
            return self._num_chars + (is_last and _is_inside_character(self._decoder))
        # One character begins with the first byte, or goes on with it. Where there are two, the first is the
        # U+FFFD of earlier bytes that this one did not go on with.
        first = self._decoder.decode(data[:1])
        begin = self._num_chars + len(first) + _is_inside_character(self._decoder) - 1
        self._num_chars += len(first) + len(self._decoder.decode(data[1:]))
        return begin


class DelayedStops:
    """A TextStream that neither looks for stop strings nor holds text back in the first ``num_free`` tokens.

    A character that begins in these is theirs, whichever token ends it.
    """

    def __init__(self, stop: Sequence[str], num_free: int) -> None:
        self._decoder = _text_decoder()
        self._matching = TextStream(stop)
        self._num_free = num_free
        self._is_next_free = False  # whether the next character began in a free token

    @property
    def stopped(self) -> bool:
        return self._matching.stopped

    def push(self, data: bytes) -> str:
        text = self._decoder.decode(data)
        if self._num_free > 0:
            self._num_free -= 1
            self._is_next_free = _is_inside_character(self._decoder)
            return text
        return self._match(text)

    def finish(self) -> str:
        return self._match(self._decoder.decode(b"", final=True)) + self._matching.finish()

    def _match(self, text: str) -> str:
        num_free = int(self._is_next_free and text != "")
        self._is_next_free &= num_free == 0
        return text[:num_free] + self._matching.push(text[num_free:].encode())


def _text_decoder() -> codecs.IncrementalDecoder:
    return codecs.getincrementaldecoder("utf-8")("replace")


def _is_inside_character(decoder: codecs.IncrementalDecoder) -> bool:
    """Whether the bytes so far end with the beginning of a character."""
    return decoder.getstate()[0] != b""
