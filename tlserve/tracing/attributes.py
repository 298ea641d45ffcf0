"""What may stand in an attribute: values of a collector's own types, and of bounded size, whoever they came from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from tlserve.http.trace import Attribute

MAX_TEXT: Final = 256  # characters
MAX_ITEMS: Final = 128  # of a list: a request has at most so many choices
_INT64_MAX: Final = 2**63 - 1


def bounded(attributes: Mapping[str, Attribute]) -> dict[str, Attribute]:
    """The same, with text and lists cut, integers held within 64 bits, and lone surrogates replaced."""
    return {name: _bounded(value) for name, value in attributes.items()}


def _bounded(value: Attribute) -> Attribute:
    if isinstance(value, bool | float):
        return value
    if isinstance(value, int):
        return max(-_INT64_MAX - 1, min(value, _INT64_MAX))
    if isinstance(value, str):
        return _text(value)
    return tuple(_text(item) for item in value[:MAX_ITEMS])


def _text(value: str) -> str:
    """Protobuf takes no text that UTF-8 has no bytes for."""
    return value[:MAX_TEXT].encode(errors="replace").decode()
