"""What the server asks of a tokenizer, whatever file it came from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol


class Tokenizer(Protocol):
    """Text to token ids and back. Encoding and decoding change nothing, so threads may share one."""

    @property
    def vocab_size(self) -> int:
        """Ids are below this."""

    @property
    def bos_token(self) -> str:
        """Spelling of the token that begins a text; "" when there is none."""

    @property
    def eos_token(self) -> str:
        """Spelling of the token that ends a text; "" when there is none."""

    @property
    def bos_id(self) -> int | None: ...

    @property
    def eos_ids(self) -> frozenset[int]:
        """Every id that ends a generation."""

    @property
    def adds_bos(self) -> bool:
        """Whether `encode(..., add_special_tokens=True)` begins with BOS."""

    @property
    def special_tokens(self) -> frozenset[str]:
        """Spellings of the control tokens: what `parse_special` is about."""

    def encode(
        self, text: str, *, add_special_tokens: bool, parse_special: bool = True, limit: int | None = None
    ) -> list[int]:
        """Ids of `text`.

        With `parse_special` a spelling of a control token becomes that token, otherwise the ids of its letters.
        `limit` is for text that cannot fit anyway: when it is certain before the work that there will be more ids
        than that, ContextLengthExceeded is raised. Fewer ids are not promised.
        """

    def encode_guarded(self, text: str, plain: Mapping[str, str], *, limit: int | None = None) -> list[int]:
        """Ids of `text`, control tokens matched, without added tokens.

        Each character that is a key of `plain` stands for the text it maps to, which is never matched as a control
        token, nor any part of it together with what stands around.
        """

    def token_bytes(self, token_id: int) -> bytes:
        """What a generated token adds to the output, b"" for a control token or an id without a token."""

    def token_text(self, token_id: int) -> str:
        """A printable spelling; bytes that are no character become U+FFFD."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, control tokens spelled out: the inverse of `encode` without added tokens."""
