"""Invariant: a live server takes what its document allows, refuses what it forbids, and answers as it says.

Schemathesis makes the requests: the document's examples, the edges of each field, then chance. What no document can
know, the model and its sizes, is put into copies of it. All of its checks run.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import core
from schemathesis import BaseSchema, Case, Config

from tests.generated import openapi_document
from tlserve import ServeConfig, spawn
from tlserve.openai.operations import MODEL

TINY = Path(__file__).parents[2] / "fixtures" / "tiny-llama"
VOCAB_SIZE, HIDDEN_SIZE, CONTEXT = 257, 64, 512
KEY = "sk-right"
IS_FUZZING = os.environ.get("HYPOTHESIS_PROFILE") == "fuzz"


@pytest.fixture(scope="module")
def origin() -> Iterator[str]:
    with spawn(ServeConfig.for_model(TINY, model_id=MODEL, max_model_len=CONTEXT)) as server:
        yield server.base_url.removesuffix("/v1")


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The same with keys."""
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(f"{KEY}\n")
    with spawn(ServeConfig.for_model(TINY, model_id=MODEL, max_model_len=CONTEXT, api_keys_file=keys)) as server:
        yield server.base_url.removesuffix("/v1")


@pytest.fixture(scope="module")
def session() -> Iterator[requests.Session]:
    with requests.Session() as session:
        yield session


def with_model() -> dict[str, Any]:
    """The document, of the server here: any other model is 404, whatever else the request holds."""
    document = openapi_document()
    for schema in document["components"]["schemas"].values():
        if "model" in schema["properties"]:
            schema["properties"]["model"] = {"const": MODEL}
    return document


def within_the_model() -> dict[str, Any]:
    """And only what fits the model, with answers that are short."""
    document = with_model()
    document["paths"]["/v1/models/{id}"]["get"]["parameters"][0]["schema"] = {"const": MODEL}
    without_header(document, "X-TL-KV-Handle")
    schemas = document["components"]["schemas"]
    fields = {name: schema["properties"] for name, schema in schemas.items()}
    for name in ("ChatRequest", "CompletionRequest"):
        schemas[name]["required"].append("max_tokens")
        fields[name]["max_tokens"] |= {"type": "integer", "maximum": 8}
        fields[name]["min_tokens"]["maximum"] = 1
        fields[name]["logit_bias"]["propertyNames"] = {"pattern": "^(0|[1-9][0-9]?)$"}
        fields[name]["stop_token_ids"]["items"]["maximum"] = VOCAB_SIZE - 1
    for name, field in (("CompletionRequest", "prompt"), ("EmbeddingRequest", "input")):
        text, ids, several = fields[name][field]["anyOf"]
        text["maxLength"], ids["maxItems"], ids["items"]["maximum"] = 64, 64, VOCAB_SIZE - 1
        several |= {"items": {"anyOf": [text, ids]}, "maxItems": 4}
    fields["ChatRequest"]["max_completion_tokens"]["maximum"] = 8
    fields["ChatRequest"]["messages"]["maxItems"] = 4
    fields["Message"]["content"]["maxLength"] = 16
    fields["EmbeddingRequest"]["dimensions"] = {"enum": [HIDDEN_SIZE, None]}
    fields["DetokenizeRequest"]["tokens"]["items"]["maximum"] = VOCAB_SIZE - 1
    return document


def with_faults_in_bodies() -> dict[str, Any]:
    """A wrong header would be refused in place of the body."""
    document = with_model()
    without_header(document, "X-TL-KV-Handle")
    without_header(document, "X-TL-Priority")
    return document


def with_key_only() -> dict[str, Any]:
    document = within_the_model()
    for operations in document["paths"].values():
        for operation in operations.values():
            operation["security"] = [rule for rule in operation["security"] if rule]
    return document


def without_header(document: dict[str, Any], name: str) -> None:
    reference = {"$ref": f"#/components/parameters/{name}"}
    for operations in document["paths"].values():
        for operation in operations.values():
            operation["parameters"] = [item for item in operation["parameters"] if item != reference]


def schema_of(document: dict[str, Any], mode: str, *, num_examples: int, with_edges: bool = True) -> BaseSchema:
    config = {
        # The same requests every time, but in `make fuzz`, which gives a seed.
        "seed": core.global_force_seed or 1,
        "generation": {
            "mode": mode,
            "deterministic": not IS_FUZZING,
            "max-examples": num_examples * 20 if IS_FUZZING else num_examples,
        },
        "checks": {
            "positive_data_acceptance": {"expected-statuses": ["200"]},
            "negative_data_rejection": {"expected-statuses": ["400", "404", "422"]},
        },
        "phases": {"examples": {"enabled": with_edges}, "coverage": {"enabled": with_edges}},
        # Their one parameter takes any text, so there is nothing wrong to make up.
        "operations": [{"include-method": "GET", "phases": {"fuzzing": {"enabled": mode != "negative"}}}],
    }
    return schemathesis.openapi.from_dict(document, config=Config.from_dict(config))


allowed = schema_of(within_the_model(), "positive", num_examples=5)
forbidden = schema_of(with_faults_in_bodies(), "negative", num_examples=5)
secured = schema_of(with_key_only(), "positive", num_examples=1, with_edges=False)


@allowed.parametrize()
def test_what_the_document_allows_is_taken(case: Case[Any], origin: str, session: requests.Session) -> None:
    case.call_and_validate(base_url=origin, session=session)


@forbidden.parametrize()
def test_what_the_document_forbids_is_refused(case: Case[Any], origin: str, session: requests.Session) -> None:
    case.call_and_validate(base_url=origin, session=session)


@secured.parametrize()
def test_a_key_is_needed_where_the_document_says_so(case: Case[Any], guarded: str, session: requests.Session) -> None:
    case.call_and_validate(base_url=guarded, session=session, headers={"Authorization": f"Bearer {KEY}"})
