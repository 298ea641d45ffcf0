"""The document as a judge: what it says of a body, and whether an answer is one that it describes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from jsonschema import Draft202012Validator

from tests.generated import openapi_document
from tlserve.http.sse import DONE

DOCUMENT = openapi_document()
OPERATIONS = {
    (method.upper(), path): operation
    for path, operations in DOCUMENT["paths"].items()
    for method, operation in operations.items()
}


def resolved(entry: dict[str, Any]) -> dict[str, Any]:
    """What a reference inside the document leads to."""
    if "$ref" not in entry:
        return entry
    found: Any = DOCUMENT
    for part in entry["$ref"].removeprefix("#/").split("/"):
        found = found[part]
    assert isinstance(found, dict)
    return found


def validator(schema: dict[str, Any]) -> Draft202012Validator:
    return Draft202012Validator({**schema, "components": DOCUMENT["components"]})


def check_answer(method: str, path: str, status: int, headers: Mapping[str, str], body: bytes) -> None:
    """Fail unless the operation can answer so: its status, the headers, the type and each document of the body."""
    answer = resolved(OPERATIONS[method, path]["responses"][str(status)])
    for name, header in answer["headers"].items():
        rule = resolved(header)
        value = headers.get(name.lower())
        assert value is not None or not rule.get("required"), f"{name} is missing"
        if value is not None:
            validator(rule["schema"]).validate(value)
    kind = headers["content-type"].partition(";")[0]
    schema = answer["content"][kind]["schema"]
    if kind == "application/json":
        validator(schema).validate(json.loads(body))
    else:
        check_stream(schema, body)


def check_stream(schema: dict[str, Any], body: bytes) -> None:
    """Each event is as described; in JSON Schema's words its ``data`` is text, whose content is JSON of its own."""
    payload, done = schema["properties"]["data"]["anyOf"]
    assert f"data: {done['const']}\n\n".encode() == DONE
    assert body.endswith(DONE)
    events = body.removesuffix(DONE).removesuffix(b"\n\n").split(b"\n\n")
    for event in events:
        validator(payload["contentSchema"]).validate(json.loads(event.removeprefix(b"data: ")))
