"""The document itself: sound, complete, the one that is served, and of one mind with the parser."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator

from tests.client import get
from tests.generated import openapi_document
from tests.openai.test_fuzz import (
    BODIES,
    CHAT,
    COMPLETIONS,
    EDGES,
    FIELDS,
    ROWS,
    TOKENIZE,
    ask,
    expected,
    put,
    with_partner,
)
from tests.openapi.described import DOCUMENT, validator
from tlserve import ServeConfig, serve
from tlserve.http.messages import Request
from tlserve.openai import parse
from tlserve.openai.openapi import document
from tlserve.openai.operations import OPERATIONS
from tlserve.openai.requests import WITHOUT_EFFECT
from tlserve.openai.service import read_priority

SUCC = Path(__file__).parents[2] / "fixtures" / "succ"
API_PAGE = Path(__file__).parents[2] / "docs" / "api.md"
SCHEMAS: dict[str, dict[str, Any]] = DOCUMENT["components"]["schemas"]
# What the document says of these is not all: the model's vocabulary and sizes decide too.
OF_THE_MODEL = {
    "model",
    "prompt",
    "input",
    "tokens",
    "dimensions",
    "max_tokens",
    "max_completion_tokens",
    "min_tokens",
    "stop_token_ids",
    "logit_bias",
    "messages[0].content",
}


def test_it_is_openapi() -> None:
    OpenAPIV31SpecValidator(openapi_document()).validate()


def test_a_route_without_an_operation_and_the_reverse_are_refused() -> None:
    with pytest.raises(LookupError, match="/v1/new"):
        document([*OPERATIONS, ("GET", "/v1/new")])
    with pytest.raises(LookupError, match="/v1/models"):
        document(list(OPERATIONS)[:-4])


async def test_a_server_gives_it_to_everybody(tmp_path: Path) -> None:
    """Without a key, to pages of an allowed origin too: it is how one learns that a key is needed."""
    keys = tmp_path / "keys"
    keys.write_text("sk-right\n")
    config = ServeConfig.for_model(SUCC, api_keys_file=keys, cors_allow_origins=("https://page.test",))
    async with serve(config) as server:
        reply = await get(server.http_addr, "/openapi.json", headers=[("Origin", "https://page.test")])
        head = await get(server.http_addr, "/openapi.json")
    assert (reply.status, reply.headers["content-type"]) == (200, "application/json")
    assert reply.headers["access-control-allow-origin"] == "https://page.test"
    assert reply.json() == head.json() == DOCUMENT


def test_every_field_and_parameter_says_what_it_is_for() -> None:
    silent = [
        (name, field)
        for name, schema in SCHEMAS.items()
        for field, rule in schema["properties"].items()
        if not {"description", "$ref", "enum", "const"} & rule.keys() and "$ref" not in str(rule)
    ]
    assert silent == []
    assert all(schema["description"] for schema in SCHEMAS.values())
    assert all(parameter["description"] for parameter in DOCUMENT["components"]["parameters"].values())
    assert all(answer["description"] for answer in DOCUMENT["components"]["responses"].values())


def test_fields_without_effect_are_those_of_the_api_page() -> None:
    page = API_PAGE.read_text().partition("Accepted without effect, whatever they hold: ")[2].partition(". So is")[0]
    assert {name.strip("` \n") for name in page.split(",")} == set(WITHOUT_EFFECT)


@pytest.mark.parametrize(("path", "name"), ROWS)
def test_it_allows_what_the_parser_takes_and_nothing_else(path: str, name: str) -> None:
    """Each value of the parser's own edges, in each field. A number past float64 is none on this wire."""
    body_type = OPERATIONS["POST", path].body
    assert body_type is not None
    judge = validator(SCHEMAS[body_type.__name__])
    for value in (value for value in EDGES if value != 10**400):
        body = put(with_partner(path, name, stream=True), name, value)
        is_taken = expected(FIELDS[path][name], value, name) == 200
        is_allowed = judge.is_valid(body)
        assert is_allowed or not is_taken, (value, list(judge.iter_errors(body)))
        assert is_taken or not is_allowed or name in OF_THE_MODEL, value


CALL = {"id": "1", "function": {"name": "f", "arguments": "{}"}}
SAID = [{"role": "user", "content": "a"}]
BETWEEN_FIELDS: list[tuple[str, dict[str, Any], bool]] = [
    (CHAT, {"stream_options": {}}, False),
    (CHAT, {"stream_options": {}, "stream": False}, False),
    (CHAT, {"stream_options": None, "stream": False}, True),
    (CHAT, {"stream_options": {}, "stream": True}, True),
    (CHAT, {"top_logprobs": 0}, False),
    (CHAT, {"top_logprobs": 0, "logprobs": None}, False),
    (CHAT, {"top_logprobs": None, "logprobs": False}, True),
    (CHAT, {"top_logprobs": 0, "logprobs": True}, True),
    (CHAT, {"messages": [{"role": "user"}]}, False),
    (CHAT, {"messages": [*SAID, {"role": "assistant"}]}, False),
    (CHAT, {"messages": [*SAID, {"role": "assistant", "tool_calls": []}]}, False),
    (CHAT, {"messages": [*SAID, {"role": "assistant", "tool_calls": None, "content": "a"}]}, True),
    (CHAT, {"messages": [*SAID, {"role": "assistant", "tool_calls": [CALL]}]}, True),
    (CHAT, {"messages": [*SAID, {"role": "assistant", "tool_calls": [CALL], "content": None}]}, True),
    (CHAT, {"messages": [*SAID, {"role": "tool", "tool_calls": [CALL], "content": None}]}, False),
    (COMPLETIONS, {"stream_options": {}}, False),
    (TOKENIZE, {"text": None}, False),
    (TOKENIZE, {"text": None, "messages": SAID}, True),
    (TOKENIZE, {"text": "a", "messages": SAID}, False),
    (TOKENIZE, {"text": "a", "messages": None}, True),
]


@pytest.mark.parametrize(("path", "fields", "is_right"), BETWEEN_FIELDS)
async def test_rules_between_fields_are_those_of_the_parser(path: str, fields: dict[str, Any], is_right: bool) -> None:
    body_type = OPERATIONS["POST", path].body
    assert body_type is not None
    body = BODIES[path] | fields
    assert (await ask(path, body)).status == (200 if is_right else 400)
    assert validator(SCHEMAS[body_type.__name__]).is_valid(body) is is_right


PARSERS: dict[str, tuple[Callable[[bytes], Any], dict[str, Any]]] = {
    "ChatRequest": (parse.parse_chat, {"model": "m", "messages": [{"role": "user", "content": "a"}], "stream": True}),
    "CompletionRequest": (parse.parse_completion, {"model": "m", "prompt": "a"}),
    "EmbeddingRequest": (parse.parse_embeddings, {"model": "m", "input": "a"}),
    "TokenizeRequest": (parse.parse_tokenize, {"model": "m", "text": "a"}),
}
DEFAULTS = [
    (name, field, rule["default"])
    for name in PARSERS
    for field, rule in SCHEMAS[name]["properties"].items()
    if "default" in rule and field != "stream"
]


@pytest.mark.parametrize(("name", "field", "default"), DEFAULTS)
def test_a_default_is_what_the_parser_takes_for_an_absent_field(name: str, field: str, default: object) -> None:
    read, body = PARSERS[name]
    assert without_asking(read(json.dumps(body).encode())) == without_asking(
        read(json.dumps(body | {field: default}).encode())
    )


def without_asking(spec: Any) -> Any:
    """The spec but for whether its maximum was asked for."""
    return (
        dataclasses.replace(spec, gen=dataclasses.replace(spec.gen, is_max_tokens_given=False))
        if hasattr(spec, "gen")
        else spec
    )


def test_streams_and_usage_are_off_by_default() -> None:
    assert SCHEMAS["ChatRequest"]["properties"]["stream"]["default"] is False
    assert SCHEMAS["StreamOptions"]["properties"]["include_usage"]["default"] is False
    body: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "a"}]}
    assert not parse.parse_chat(json.dumps(body).encode()).gen.stream
    body |= {"stream": True, "stream_options": {}}
    assert not parse.parse_chat(json.dumps(body).encode()).gen.include_usage


def test_the_range_of_priorities_is_the_one_that_is_read() -> None:
    rule = DOCUMENT["components"]["parameters"]["X-TL-Priority"]["schema"]

    def read(*value: int) -> int:
        headers = tuple(("x-tl-priority", str(item)) for item in value)
        return read_priority(Request("POST", "/", "", headers, b"", "id"))

    assert read() == rule["default"]
    assert (read(rule["minimum"]), read(rule["maximum"])) == (rule["minimum"], rule["maximum"])
    for outside in (rule["minimum"] - 1, rule["maximum"] + 1):
        with pytest.raises(Exception, match="must be an integer from -100 to 100"):
            read(outside)
