"""Every kind of answer of a live server, whole and chunk by chunk, against the document's schemas."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from jsonschema import ValidationError

from tests.client import Address, get, post
from tests.openai.fakes import RecordedReply
from tests.openapi.described import OPERATIONS, check_answer, check_stream
from tlserve import ServeConfig, serve
from tlserve.health import Health, Phase
from tlserve.http.messages import Request
from tlserve.http.sse import DONE
from tlserve.openai.operations import MODEL

TINY = Path(__file__).parents[2] / "fixtures" / "tiny-llama"
MESSAGES = [{"role": "user", "content": "Hi"}]
USAGE = {"stream_options": {"include_usage": True}}
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": MESSAGES}),
    ("/v1/chat/completions", {"messages": MESSAGES, "logprobs": True, "top_logprobs": 2, "stop": "e"}),
    ("/v1/completions", {"prompt": "Hi"}),
    ("/v1/completions", {"prompt": ["Hi", [72, 105]], "logprobs": 2}),
    ("/v1/embeddings", {"input": ["Hi", [72, 105]]}),
    ("/v1/embeddings", {"input": "Hi", "encoding_format": "base64"}),
    ("/v1/tokenize", {"text": "Hi", "add_special_tokens": True}),
    ("/v1/tokenize", {"messages": MESSAGES}),
    ("/v1/detokenize", {"tokens": [72, 105, 256]}),
]
STREAMS = [(path, body | {"stream": True} | extra) for path, body in BODIES[:4] for extra in ({}, USAGE)]
EXAMPLES = [
    pytest.param(path, example["value"], id=f"{path}-{name}")
    for (method, path), entry in OPERATIONS.items()
    if method == "POST"
    for name, example in entry["requestBody"]["content"]["application/json"]["examples"].items()
]


@pytest.fixture
async def address() -> AsyncIterator[Address]:
    async with serve(ServeConfig.for_model(TINY, model_id=MODEL)) as server:
        yield server.http_addr


@pytest.mark.parametrize(("path", "body"), [*BODIES, *STREAMS])
async def test_an_answer_is_as_described(address: Address, path: str, body: dict[str, Any]) -> None:
    if path in ("/v1/chat/completions", "/v1/completions"):
        body = body | {"max_tokens": 24, "temperature": 1, "seed": 5}
    reply = await post(address, path, {"model": MODEL, **body})
    assert reply.headers["content-type"].startswith("text/event-stream" if body.get("stream") else "application/json")
    check_answer("POST", path, reply.status, reply.headers, reply.body)


@pytest.mark.parametrize(("path", "body"), EXAMPLES)
async def test_the_examples_work_as_they_stand(address: Address, path: str, body: dict[str, Any]) -> None:
    reply = await post(address, path, body)
    assert reply.status == 200, reply.body
    check_answer("POST", path, reply.status, reply.headers, reply.body)


async def test_the_models_are_as_described(address: Address) -> None:
    for path, target in (("/v1/models", "/v1/models"), ("/v1/models/{id}", f"/v1/models/{MODEL}")):
        reply = await get(address, target)
        check_answer("GET", path, reply.status, reply.headers, reply.body)


async def test_a_process_that_cannot_go_on_is_as_described() -> None:
    health, reply = Health(), RecordedReply()
    health.phase = Phase.FAILED
    await health.healthz(Request("GET", "/healthz", "", (), b"", "id"), reply)
    headers = {name.lower(): value for name, value in reply.headers}
    assert reply.json == {"status": "failed"}
    check_answer("GET", "/healthz", reply.status, {"x-request-id": "id", **headers}, reply.body)


def test_a_stream_with_one_wrong_chunk_is_told_from_a_right_one() -> None:
    schema = OPERATIONS["POST", "/v1/chat/completions"]["responses"]["200"]["content"]["text/event-stream"]["schema"]
    error = {"error": {"message": "m", "type": "server_error", "param": None, "code": "internal_error"}}
    check_stream(schema, b"data: %s\n\n" % json.dumps(error).encode() + DONE)
    for wrong in ({}, {"error": {"message": "m"}}, {"id": "x", "choices": []}):
        with pytest.raises(ValidationError):
            check_stream(schema, b"data: %s\n\n" % json.dumps(wrong).encode() + DONE)
