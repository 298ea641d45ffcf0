"""What each route of the API port takes and gives, as the OpenAPI document lists it.

Rule 1: a status is listed where a request can get it, and only there. So 404 ``route_not_found`` and 405 are nowhere:
        who gets one of them has asked for no operation.
Rule 2: an example works as it stands with the model that the README serves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from msgspec import Struct

from tlserve import errors
from tlserve.errors import ApiError
from tlserve.openai import requests, schema

Route = tuple[str, str]  # method and pattern
Errors = tuple[type[ApiError], ...]

MODEL: Final = "smol-135m"

# What the HTTP layer may answer before a request has reached its route.
OF_ANY: Final[Errors] = (
    errors.InvalidRequest,
    errors.RequestTimeout,
    errors.PayloadTooLarge,
    errors.HeadersTooLarge,
    errors.NoCapacity,
    errors.ShuttingDown,
    errors.VersionNotSupported,
)
OF_V1: Final[Errors] = (*OF_ANY, errors.Unauthorized, errors.ModelLoading)
OF_MODEL: Final[Errors] = (*OF_V1, errors.ModelNotFound)
OF_BODY: Final[Errors] = (*OF_MODEL, errors.InternalFault)
OF_ENGINE: Final[Errors] = (
    *OF_BODY,
    errors.ContextLengthExceeded,
    errors.KvHandleNotFound,
    errors.UnsupportedParameter,
    errors.Overloaded,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    id: str
    summary: str
    answer: type[Struct] | None  # None: a schema of the document's own
    body: type[Struct] | None = None
    chunk: type[Struct] | None = None  # an event of its stream
    errors: Errors = OF_ANY
    examples: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    is_extension: bool = False

    @property
    def runs_in_engine(self) -> bool:
        """Whether it is scheduled, and so has a priority."""
        return errors.Overloaded in self.errors

    @property
    def needs_key(self) -> bool:
        return errors.Unauthorized in self.errors


_MESSAGES: Final = [{"role": "user", "content": "Name three colours."}]

OPERATIONS: Final[dict[Route, Operation]] = {
    ("POST", "/v1/chat/completions"): Operation(
        id="createChatCompletion",
        summary="Answer a conversation",
        body=requests.ChatRequest,
        answer=schema.ChatCompletion,
        chunk=schema.ChatChunk,
        errors=OF_ENGINE,
        examples={
            "whole": {"model": MODEL, "messages": _MESSAGES, "max_tokens": 16, "seed": 7},
            "streamed": {
                "model": MODEL,
                "messages": [{"role": "system", "content": "Be brief."}, *_MESSAGES],
                "max_tokens": 16,
                "temperature": 0,
                "stream": True,
                "stream_options": {"include_usage": True},
            },
        },
    ),
    ("POST", "/v1/completions"): Operation(
        id="createCompletion",
        summary="Continue a text",
        body=requests.CompletionRequest,
        answer=schema.Completion,
        chunk=schema.Completion,
        errors=OF_ENGINE,
        examples={
            "whole": {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 16, "stop": ["\n"]},
            "streamed": {"model": MODEL, "prompt": ["One, two,", "Red, green,"], "temperature": 0, "stream": True},
        },
    ),
    ("POST", "/v1/embeddings"): Operation(
        id="createEmbedding",
        summary="Turn texts into vectors",
        body=requests.EmbeddingRequest,
        answer=schema.EmbeddingList,
        errors=OF_ENGINE,
        examples={"two texts": {"model": MODEL, "input": ["a cat", "a dog"], "encoding_format": "base64"}},
    ),
    ("POST", "/v1/tokenize"): Operation(
        id="tokenize",
        summary="Turn text or messages into token ids",
        body=requests.TokenizeRequest,
        answer=schema.TokenizeResponse,
        errors=(*OF_BODY, errors.UnsupportedParameter),
        examples={
            "text": {"model": MODEL, "text": "Hello"},
            "messages": {"model": MODEL, "messages": _MESSAGES},
        },
        is_extension=True,
    ),
    ("POST", "/v1/detokenize"): Operation(
        id="detokenize",
        summary="Turn token ids into text",
        body=requests.DetokenizeRequest,
        answer=schema.DetokenizeResponse,
        errors=OF_BODY,
        examples={"three tokens": {"model": MODEL, "tokens": [72, 101, 121]}},
        is_extension=True,
    ),
    ("GET", "/v1/models"): Operation(
        id="listModels", summary="The served models", answer=schema.ModelList, errors=OF_V1
    ),
    ("GET", "/v1/models/{id:path}"): Operation(
        id="retrieveModel", summary="One served model", answer=schema.ModelCard, errors=OF_MODEL
    ),
    ("GET", "/healthz"): Operation(
        id="healthz", summary="Whether the process can go on", answer=None, is_extension=True
    ),
    ("GET", "/health"): Operation(id="health", summary="/healthz by another name", answer=None, is_extension=True),
    ("GET", "/openapi.json"): Operation(id="openapi", summary="This document", answer=None, is_extension=True),
}
