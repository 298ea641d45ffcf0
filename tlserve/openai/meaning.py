"""What a field of the wire is for, said beside its type: words for the OpenAPI document, which check nothing."""

from __future__ import annotations

from typing import Any

from msgspec import Meta


def means(text: str, *, default: object = None, served: dict[str, Any] | None = None) -> Meta:
    """What a field is for and what holds without it.

    ``served`` is the JSON Schema of the values that are taken, where the type also lets through what is refused later.
    """
    return Meta(extra_json_schema={"x-means": text, "x-default": default, "x-served": served})


def extends(text: str, *, default: object = None, served: dict[str, Any] | None = None) -> Meta:
    """``means``, of a field that OpenAI's reference does not have."""
    return Meta(extra_json_schema={"x-means": text, "x-default": default, "x-served": served, "x-extension": True})
