"""From the structs of the wire to JSON Schema, as OpenAPI 3.1 takes it (draft 2020-12).

msgspec knows types and bounds. What is added here: the words of ``meaning``, the values that are served where they are
fewer than the type's, null as one more type, and which fields of an answer are always there.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from typing import Any, Final

import msgspec
from msgspec import Struct

Schema = dict[str, Any]

_REF: Final = "#/components/schemas/{name}"
_DROPPED: Final = ("title", "description", "default")  # our rules in words, and null where a field may be absent
_NULL: Final = {"type": "null"}


def ref(name: str) -> Schema:
    return {"$ref": _REF.format(name=name)}


def text_of(documented: type) -> str:
    """A class's docstring as Markdown on one line."""
    return _plain(documented.__doc__ or "")


def request_schemas(structs: Sequence[type[Struct]]) -> dict[str, Schema]:
    """By name, the schemas of ``structs`` and of all structs inside them."""
    return {name: _tidy_struct(schema) for name, schema in _generated(structs).items()}


def answer_schemas(structs: Sequence[type[Struct]]) -> dict[str, Schema]:
    """The same of what a server sends: a default is sent like any other value, so only UNSET fields may be absent."""
    generated = _generated(structs)
    for schema in generated.values():
        is_sent = [name in schema["required"] or "default" in field for name, field in schema["properties"].items()]
        schema["required"] = list(compress(schema["properties"], is_sent))
    return {name: _tidy_struct(schema) for name, schema in generated.items()}


def _generated(structs: Sequence[type[Struct]]) -> dict[str, Schema]:
    _, components = msgspec.json.schema_components(structs, schema_hook=_any_value, ref_template=_REF)
    return components


def _any_value(kind: type) -> Schema:
    """The schema of ``object``, the one type here that msgspec does not know; it refuses an empty one."""
    assert kind is object
    return {"description": "any value"}


def _tidy_struct(schema: Schema) -> Schema:
    properties = {name: _tidy(field) for name, field in schema["properties"].items()}
    tidy = {"type": "object", "description": _plain(schema.get("description", "")), "properties": properties}
    return tidy | ({"required": schema["required"]} if schema["required"] else {})


def _tidy(schema: Schema) -> Schema:
    """One field: its rule is in the keywords, so its description is what it means."""
    words: Schema = {"description": schema["x-means"]} if "x-means" in schema else {}
    if schema.get("x-default") is not None:
        words["default"] = schema["x-default"]
    if schema.get("x-extension"):
        words["x-extension"] = True
    return words | _core(schema)


def _core(schema: Schema) -> Schema:
    """The keywords alone."""
    if schema.get("x-served"):
        return dict(schema["x-served"])
    core = {key: value for key, value in schema.items() if not key.startswith("x-") and key not in _DROPPED}
    if "anyOf" in core:
        return _any_of([_core(option) for option in core["anyOf"]])
    if "enum" in core:
        return {"type": "string", **core}  # no literal on the wire is anything else
    for key in ("items", "additionalProperties"):
        if isinstance(core.get(key), dict):
            core[key] = _core(core[key])
    return core


def _any_of(options: list[Schema]) -> Schema:
    """One of ``options``; null is one more type of a single other one that has a type."""
    flat = [part for option in options for part in option.get("anyOf", [option])]
    if len(flat) != 2 or flat[1] != _NULL or "type" not in flat[0]:
        return {"anyOf": flat}
    option = flat[0]
    values = {"enum": [*option["enum"], None]} if "enum" in option else {}
    return {**option, "type": [option["type"], "null"], **values}


def _plain(docstring: str) -> str:
    return " ".join(docstring.replace("``", "`").split())
