"""Error documents: alone and as the last event of a stream."""

from __future__ import annotations

import inspect
import json

import pytest

from tlserve import errors
from tlserve.errors import ApiError, InvalidRequest, MethodNotAllowed, Overloaded, Unauthorized
from tlserve.openai.errors import ERRORS

# The contract's table: status, type, code.
TABLE = {
    (400, "invalid_request_error", None),
    (400, "invalid_request_error", "context_length_exceeded"),
    (401, "authentication_error", "invalid_api_key"),
    (404, "invalid_request_error", "model_not_found"),
    (404, "invalid_request_error", "kv_handle_not_found"),
    (404, "invalid_request_error", "route_not_found"),
    (405, "invalid_request_error", "method_not_allowed"),
    (408, "timeout_error", "request_timeout"),
    (413, "invalid_request_error", "payload_too_large"),
    (422, "invalid_request_error", "unsupported_parameter"),
    (429, "rate_limit_error", "rate_limit_exceeded"),
    (431, "invalid_request_error", "headers_too_large"),
    (500, "server_error", "internal_error"),
    (503, "server_error", "no_capacity"),
    (503, "server_error", "shutting_down"),
    (503, "server_error", "model_loading"),
}


def test_every_error_of_the_contract_has_its_class() -> None:
    found = set()
    for _, kind in inspect.getmembers(errors, inspect.isclass):
        if not issubclass(kind, ApiError) or not hasattr(kind, "status"):
            continue
        error = kind("m", allow=("GET",)) if kind is MethodNotAllowed else kind("m")
        response = ERRORS.response(error)
        detail = json.loads(response.body)["error"]
        assert list(detail) == ["message", "type", "param", "code"]
        found.add((response.status, detail["type"], detail["code"]))
    assert found >= TABLE


def test_an_error_brings_its_headers() -> None:
    json_type = ("Content-Type", "application/json")
    assert ERRORS.response(InvalidRequest("m")).headers == (json_type,)
    assert ERRORS.response(Overloaded("m")).headers == (json_type, ("Retry-After", "1"))
    assert ERRORS.response(Unauthorized("m")).headers == (json_type, ("WWW-Authenticate", "Bearer"))
    assert ERRORS.response(MethodNotAllowed("m", allow=("GET", "HEAD"))).headers[1] == ("Allow", "GET, HEAD")


def test_an_error_event_is_one_line() -> None:
    event = ERRORS.event(InvalidRequest("a\n\r\u2028\x85b", param="p"))
    assert event.startswith(b'data: {"error":')
    assert event.endswith(b"\n\n")
    assert len(event.decode().splitlines()) == 2
    assert json.loads(event.removeprefix(b"data: "))["error"]["message"] == "a\n\r\u2028\x85b"


@pytest.mark.parametrize("message", ["\ud83d", "\x00", "x" * 100_000, "é\uffff"])
def test_any_message_can_be_sent(message: str) -> None:
    for raw in (ERRORS.response(InvalidRequest(message)).body, ERRORS.event(InvalidRequest(message))[6:]):
        assert json.loads(raw)["error"]["type"] == "invalid_request_error"
