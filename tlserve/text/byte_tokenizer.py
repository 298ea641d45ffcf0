"""The tokenizer of models that read bytes: an id is a byte."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tlserve.text.limits import check_token_limit

NUM_BYTES = 256


class ByteTokenizer:
    """256 ids and no control tokens. `eos_ids` are bytes that end a generation, where the model names any."""

    vocab_size = NUM_BYTES
    bos_token = ""
    eos_token = ""
    bos_id: int | None = None
    adds_bos = False
    special_tokens: frozenset[str] = frozenset()

    def __init__(self, eos_ids: frozenset[int] = frozenset()) -> None:
        self.eos_ids = eos_ids

    def encode(
        self, text: str, *, add_special_tokens: bool, parse_special: bool = True, limit: int | None = None
    ) -> list[int]:
        data = text.encode()
        check_token_limit(len(data), limit)
        return list(data)

    def encode_guarded(self, text: str, plain: Mapping[str, str], *, limit: int | None = None) -> list[int]:
        restored = text.translate({ord(char): spelling for char, spelling in plain.items()})
        return self.encode(restored, add_special_tokens=False, limit=limit)

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if 0 <= token_id < NUM_BYTES else b""

    def token_text(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def decode(self, ids: Sequence[int]) -> str:
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", "replace")


def byte_tokenizer(eos_ids: frozenset[int] = frozenset()) -> ByteTokenizer:
    return ByteTokenizer(eos_ids)
