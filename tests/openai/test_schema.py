"""The wire's structs against the documentation and against the reference client's own types."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import openai.types
import pydantic
import pytest
from openai.types import chat

from tests.openai.fakes import Api
from tlserve.openai import requests

API_PAGE = Path(__file__).parents[2] / "docs" / "api.md"
REQUESTS = (
    requests.ChatRequest,
    requests.CompletionRequest,
    requests.EmbeddingRequest,
    requests.TokenizeRequest,
    requests.DetokenizeRequest,
    requests.Message,
    requests.StreamOptions,
)


@pytest.mark.parametrize("request_type", REQUESTS, ids=lambda struct: struct.__name__)
def test_every_request_field_is_documented(request_type: type[msgspec.Struct]) -> None:
    page = API_PAGE.read_text()
    assert [name for name in request_type.__struct_fields__ if f"`{name}`" not in page] == []


def check(model: type[pydantic.BaseModel], document: Any) -> None:
    """Every field that the client requires is there with its type, and none that it does not know."""
    assert unknown_fields(model.model_validate(document)) == []


def unknown_fields(value: object) -> list[str]:
    if isinstance(value, pydantic.BaseModel):
        inner = [name for field in type(value).model_fields for name in unknown_fields(getattr(value, field))]
        return [*(value.model_extra or {}), *inner]
    if isinstance(value, list):
        return [name for item in value for name in unknown_fields(item)]
    return []


async def test_documents_are_those_of_the_reference_client() -> None:
    api = Api()
    check(chat.ChatCompletion, (await api.chat("a", max_tokens=2, logprobs=True, top_logprobs=1)).json)
    check(openai.types.Completion, (await api.complete("a", max_tokens=2, logprobs=1)).json)
    options: dict[str, Any] = {"max_tokens": 2, "stream": True, "stream_options": {"include_usage": True}}
    for event in (await api.chat("a", logprobs=True, top_logprobs=1, **options)).events[:-1]:
        check(chat.ChatCompletionChunk, event)
    for event in (await api.complete("a", logprobs=1, **options)).events[:-1]:
        # The client's type wants a finish_reason in every chunk; null is what the reference sends before the last.
        for choice in event["choices"]:
            choice["finish_reason"] = choice["finish_reason"] or "stop"
        check(openai.types.Completion, event)
    check(openai.types.Model, (await api.call("/v1/models/succ")).json)
