"""The OpenAPI document: what ``operations`` and the structs of the wire say, put into one JSON object."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, Final

import msgspec

from tlserve.errors import ApiError
from tlserve.http.sse import SSE_HEADERS
from tlserve.openai import requests, schema
from tlserve.openai.json_schema import Schema, answer_schemas, ref, request_schemas, text_of
from tlserve.openai.operations import MODEL, OPERATIONS, Errors, Operation, Route

_INFO: Final = {
    "title": "trio-tlserve",
    "version": "1.0.0",
    "description": (
        "An OpenAI-compatible API on one model. `x-extension: true` marks what OpenAI's API does not have.\n\n"
        "HEAD works wherever GET does. A path that takes other methods answers 405 with `Allow`, and one that is none "
        "404. A body is read as JSON whatever its `Content-Type`. `null` is the same as leaving a field out, `5.0` is "
        "an integer, and fields that are not listed are ignored."
    ),
    "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
}
_OWN_ANSWERS: Final = {"healthz": "Health", "health": "Health", "openapi": "OpenApi"}
_OWN_SCHEMAS: Final[dict[str, Schema]] = {
    "Health": {
        "type": "object",
        "description": "`ok` while the process can go on, `failed` after a fault of the engine.",
        "properties": {"status": {"type": "string", "enum": ["ok", "failed"]}},
        "required": ["status"],
    },
    "OpenApi": {
        "type": "object",
        "description": "An OpenAPI document.",
        "properties": {"openapi": {"type": "string", "const": "3.1.0"}},
        "required": ["openapi", "info", "paths"],
    },
}
_PARAMETERS: Final[dict[str, Schema]] = {
    "X-Request-Id": {
        "description": "Given back when it is 1 to 128 characters of `[A-Za-z0-9._:-]`; a fresh one otherwise.",
        "schema": {"type": "string"},
    },
    "traceparent": {
        "description": "The trace that this is part of (W3C), where the server makes traces. Else without effect.",
        "x-extension": True,
        "schema": {"type": "string"},
    },
    "X-TL-Priority": {
        "description": "Higher runs sooner.",
        "x-extension": True,
        "schema": {"type": "integer", "minimum": -100, "maximum": 100, "default": 0},
    },
    "X-TL-KV-Handle": {
        "description": "There are no handles yet: any value is 404 `kv_handle_not_found`.",
        "x-extension": True,
        "schema": {"type": "string"},
    },
}
_OF_EVERY_ANSWER: Final[dict[str, Schema]] = {
    "X-Request-Id": {
        "description": "The request's own id, or a fresh one. The log has it.",
        "required": True,
        "schema": {"type": "string", "pattern": "^[A-Za-z0-9._:-]{1,128}$"},
    },
    "traceresponse": {
        "description": "The trace and the span of the answer, where the server makes traces.",
        "x-extension": True,
        "schema": {"type": "string"},
    },
}
_MODEL_ID: Final[Schema] = {
    "name": "id",
    "in": "path",
    "required": True,
    "description": "May hold `/`, as it is or escaped.",
    "schema": {"type": "string", "minLength": 1},
    "example": MODEL,
}
_DONE: Final[Schema] = {"const": "[DONE]", "description": "The last event of a stream that is complete."}


def document(routes: Iterable[Route]) -> dict[str, Any]:
    """The document of a server with these routes. Raises LookupError unless they are those of ``OPERATIONS``."""
    given = set(routes)
    if given != OPERATIONS.keys():
        raise LookupError(f"routes without an operation, or the reverse: {sorted(given ^ OPERATIONS.keys())}")
    paths: dict[str, Any] = {}
    for (method, pattern), operation in OPERATIONS.items():
        paths.setdefault(pattern.replace(":path}", "}"), {})[method.lower()] = _operation(operation, pattern)
    return {"openapi": "3.1.0", "info": _INFO, "paths": paths, "components": _components()}


@cache
def document_bytes(routes: frozenset[Route]) -> bytes:
    return msgspec.json.encode(document(routes))


def _operation(operation: Operation, pattern: str) -> dict[str, Any]:
    names = list(_PARAMETERS) if operation.runs_in_engine else ["X-Request-Id", "traceparent"]
    references = [{"$ref": f"#/components/parameters/{name}"} for name in names]
    entry: dict[str, Any] = {
        "operationId": operation.id,
        "summary": operation.summary,
        "parameters": [_MODEL_ID, *references] if "{id" in pattern else references,
    }
    if operation.is_extension:
        entry["x-extension"] = True
    if operation.body is not None:
        entry["requestBody"] = _request_body(operation.body.__name__, operation.examples)
    return entry | {
        "responses": _responses(operation),
        "security": [{"key": []}, {}] if operation.needs_key else [],
    }


def _request_body(name: str, examples: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    values = {title: {"value": value} for title, value in examples.items()}
    return {"required": True, "content": {"application/json": {"schema": ref(name), "examples": values}}}


def _responses(operation: Operation) -> dict[str, Schema]:
    found = {"200": _success(operation)}
    for status, classes in _by_status(operation.errors).items():
        found[str(status)] = {"$ref": f"#/components/responses/{_response_name(classes)}"}
    if _OWN_ANSWERS.get(operation.id) == "Health":
        found["503"] = _failed_health()
    return found


def _by_status(classes: Errors) -> dict[int, Errors]:
    statuses = sorted({error.status for error in classes})
    return {status: tuple(error for error in classes if error.status == status) for status in statuses}


def _response_name(classes: Errors) -> str:
    return "Or".join(error.__name__ for error in classes)


def _success(operation: Operation) -> Schema:
    name = _OWN_ANSWERS[operation.id] if operation.answer is None else operation.answer.__name__
    content: dict[str, Any] = {"application/json": {"schema": ref(name)}}
    headers = _headers()
    if operation.chunk is not None:
        content["text/event-stream"] = {"schema": _event(operation.chunk.__name__)}
        headers |= {
            name: {"description": "On a stream.", "schema": {"type": "string", "const": value}}
            for name, value in SSE_HEADERS
            if name != "Content-Type"
        }
    return {"description": operation.summary, "headers": headers, "content": content}


def _event(chunk: str) -> Schema:
    """One server-sent event: OpenAPI before 3.2 has no other place for what a stream is made of."""
    payload = {
        "type": "string",
        "contentMediaType": "application/json",
        "contentSchema": {"anyOf": [ref(chunk), ref("ErrorDocument")]},
    }
    return {
        "type": "object",
        "description": "One event. An error is the last one, and no `[DONE]` comes after it.",
        "properties": {"data": {"anyOf": [payload, _DONE]}},
        "required": ["data"],
    }


def _failed_health() -> Schema:
    either = {"anyOf": [ref("Health"), ref("ErrorDocument")]}
    return {
        "description": "A fault ended the engine, or the server takes no more connections.",
        "headers": _headers(),
        "content": {"application/json": {"schema": either}},
    }


def _headers(*classes: type[ApiError]) -> dict[str, Schema]:
    own = {name: value for error in classes for name, value in error("").headers}
    fixed = {name: {"required": True, "schema": {"type": "string", "const": value}} for name, value in own.items()}
    return {name: {"$ref": f"#/components/headers/{name}"} for name in _OF_EVERY_ANSWER} | fixed


def _components() -> dict[str, Any]:
    groups = [group for operation in OPERATIONS.values() for group in _by_status(operation.errors).values()]
    return {
        "securitySchemes": {
            "key": {
                "type": "http",
                "scheme": "bearer",
                "description": "Needed where the server has `api_keys_file`.",
            }
        },
        "parameters": {name: {"name": name, "in": "header", **rest} for name, rest in _PARAMETERS.items()},
        "headers": _OF_EVERY_ANSWER,
        "responses": {_response_name(group): _error_response(group) for group in groups},
        "schemas": {**_request_components(), **_answer_components(), **_OWN_SCHEMAS},
    }


def _error_response(classes: Errors) -> Schema:
    """The answer of one status, whichever of these errors it is."""
    words = [f"`{error.code}`: {text_of(error)}" if error.code else text_of(error) for error in classes]
    detail = {
        "type": {"enum": list(dict.fromkeys(error.kind for error in classes))},
        "code": {"enum": [error.code for error in classes]},
    }
    body = {"allOf": [ref("ErrorDocument"), {"properties": {"error": {"properties": detail}}}]}
    return {
        "description": "\n\n".join(words),
        "headers": _headers(*classes),
        "content": {"application/json": {"schema": body}},
    }


def _request_components() -> dict[str, Schema]:
    bodies = [operation.body for operation in OPERATIONS.values() if operation.body is not None]
    schemas = request_schemas(bodies)
    without_effect = {"description": "Taken without effect."}
    for name in ("ChatRequest", "CompletionRequest"):
        schemas[name]["properties"] |= dict.fromkeys(requests.WITHOUT_EFFECT, without_effect)
        schemas[name]["dependentSchemas"] = {"stream_options": _needs("stream_options", "stream")}
    schemas["ChatRequest"]["dependentSchemas"]["top_logprobs"] = _needs("top_logprobs", "logprobs")
    schemas["EmbeddingRequest"]["properties"]["user"] = without_effect
    schemas["TokenizeRequest"]["oneOf"] = [_given("text"), _given("messages")]
    schemas["Message"] |= {"if": _IS_CALL, "else": _given("content")}
    return schemas


_IS_CALL: Final[Schema] = {
    "properties": {"role": {"const": "assistant"}, "tool_calls": {"type": "array", "minItems": 1}},
    "required": ["tool_calls"],
}


def _given(name: str) -> Schema:
    """A field that is there and not null."""
    return {"properties": {name: {"not": {"type": "null"}}}, "required": [name]}


def _needs(name: str, flag: str) -> Schema:
    """A field that may hold something only where another one is true."""
    return {
        "anyOf": [{"properties": {name: {"type": "null"}}}, {"properties": {flag: {"const": True}}, "required": [flag]}]
    }


def _answer_components() -> dict[str, Schema]:
    answers = [operation.answer for operation in OPERATIONS.values() if operation.answer is not None]
    chunks = [operation.chunk for operation in OPERATIONS.values() if operation.chunk is not None]
    schemas = answer_schemas([schema.ErrorDocument, *answers, *chunks])
    return schemas
