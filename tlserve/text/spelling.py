"""How a vocabulary spells bytes, and back.

byte level   every byte has a printable character of its own (GPT-2's alphabet)
metaspace    a space is `▁`, and <0xNN> is a byte (SentencePiece)
plain        the text itself
"""

from __future__ import annotations

import enum
import re


class Spelling(enum.Enum):
    """The alphabet of a vocabulary's tokens."""

    BYTE_LEVEL = "byte level"
    METASPACE = "metaspace"
    PLAIN = "plain"

    def to_bytes(self, token: str) -> bytes:
        """The bytes that a token of the vocabulary stands for."""
        if self is Spelling.BYTE_LEVEL:
            return b"".join(_BYTE_OF_CHAR.get(char) or char.encode() for char in token)
        if self is Spelling.METASPACE:
            byte = _BYTE_TOKEN.fullmatch(token)
            return bytes([int(byte[1], 16)]) if byte else token.replace("▁", " ").encode()
        return token.encode()


def byte_alphabet() -> dict[int, str]:
    """GPT-2's alphabet: a byte that is a visible Latin-1 character is itself, the others follow from U+0100."""
    visible = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {byte: chr(byte) for byte in visible} | {byte: chr(256 + place) for place, byte in enumerate(hidden)}


_BYTE_OF_CHAR = {char: bytes([byte]) for byte, char in byte_alphabet().items()}
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
