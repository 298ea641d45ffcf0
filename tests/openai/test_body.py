"""Bodies: what is JSON for us, and what a client reads when it is not.

Invariant: any bytes decode to what the standard library reads in them, or raise InvalidRequest.
"""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tlserve.errors import InvalidRequest
from tlserve.openai import body, requests

NOT_JSON = {
    "empty": b"",
    "blank": b"  ",
    "no object": b"[1]",
    "trailing data": b'{"a":1} {"b":2}',
    "trailing nul": b'{"a":1}\x00',
    "NaN": b'{"a":NaN}',
    "Infinity": b'{"a":Infinity}',
    "minus Infinity": b'{"a":-Infinity}',
    "a number that is infinite as float64": b'{"a":1e999}',
    "the same below zero": b'{"a":[-1e999]}',
    "lone high surrogate": b'{"a":"x \\ud83d y and more text"}',
    "lone high surrogate at the end": b'{"a":"\\ud83d"}',
    "lone low surrogate": b'{"a":"\\ude00"}',
    "surrogates in the wrong order": b'{"a":"\\ude00\\ud83d"}',
    "lone surrogate in a key": b'{"\\ud83d":1}',
    "surrogate as UTF-8": b'{"a":"\xed\xa0\x80"}',
    "invalid UTF-8": b'{"a":"\xff"}',
    "overlong UTF-8": b'{"a":"\xc0\x80"}',
    "past Unicode": b'{"a":"\xf4\x90\x80\x80"}',
    "UTF-16": '{"a":1}'.encode("utf-16"),
    "byte order mark": b'\xef\xbb\xbf{"a":1}',
    "leading zero": b'{"a":01}',
    "plus sign": b'{"a":+1}',
    "no digits": b'{"a":.5}',
    "single quotes": b"{'a':1}",
    "trailing comma": b'{"a":1,}',
    "comment": b'{"a":1}//',
    "raw line end in a string": b'{"a":"\n"}',
    "cut off": b'{"a":',
}


@pytest.mark.parametrize("raw", NOT_JSON.values(), ids=NOT_JSON)
def test_what_is_not_one_json_object_is_refused(raw: bytes) -> None:
    with pytest.raises(InvalidRequest) as caught:
        body.decode_object(raw)
    assert caught.value.param is None
    assert "JSON object" in caught.value.message
    json.dumps(caught.value.message).encode()  # the message itself can be sent


@pytest.mark.parametrize("key", ["messages", "an unknown field"])
def test_text_rules_hold_in_every_field(key: str) -> None:
    with pytest.raises(InvalidRequest):
        body.decode_object(b'{"%s":[{"x":"\\ud83d."}]}' % key.encode())


@pytest.mark.parametrize("raw", [b"", b" \r\n\t"])
def test_an_empty_body_is_said_to_be_empty(raw: bytes) -> None:
    with pytest.raises(InvalidRequest, match=r"^the body is empty"):
        body.read(raw, requests.ChatRequest)


def nested(levels: int, *, opening: str = "[", closing: str = "]") -> bytes:
    """An object of that many levels, itself the first."""
    return ('{"a":' + opening * (levels - 1) + "1" * (opening != "[") + closing * (levels - 1) + "}").encode()


@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a":', "}")])
def test_nesting_past_64_levels_is_refused(opening: str, closing: str) -> None:
    body.decode_object(nested(64, opening=opening, closing=closing))
    for levels in (65, 900, 100_000):
        with pytest.raises(InvalidRequest, match="64 levels"):
            body.decode_object(nested(levels, opening=opening, closing=closing))


def test_the_last_of_equal_keys_wins_whatever_the_first_one_held() -> None:
    raw = b'{"model":5,"text":"a","model":"m","text":"b"}'
    assert body.read(raw, requests.TokenizeRequest) == requests.TokenizeRequest(model="m", text="b")


@pytest.mark.parametrize(
    ("text", "value"),
    [("5.0", 5), ("1e3", 1000), ("-0.0", 0), ("5.5", 5.5), ("1e300", 10**300 // 10**300), ("[1.0,[2.0]]", [1, [2]])],
)
def test_an_integral_float_is_an_integer(text: str, value: object) -> None:
    decoded = body.decode_object(b'{"a":%s}' % text.encode())["a"]
    if text == "1e300":
        assert isinstance(decoded, int)
    else:
        assert decoded == value
        assert type(decoded) is type(value)


def test_true_and_false_are_no_numbers() -> None:
    assert body.decode_object(b'{"a":[true,false]}') == {"a": [True, False]}
    for field in ("max_tokens", "temperature", "seed", "n", "top_k"):
        with pytest.raises(InvalidRequest, match=f"{field} must be .*, got true"):
            body.read(b'{"model":"m","prompt":"p","%s":true}' % field.encode(), requests.CompletionRequest)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


@given(st.dictionaries(st.text(), JSON_VALUES, max_size=4))
def test_decoding_agrees_with_the_standard_library(value: dict[str, object]) -> None:
    assert body.decode_object(json.dumps(value).encode()) == value


@given(st.binary(max_size=60) | st.text(max_size=40).map(str.encode))
def test_any_bytes_decode_or_raise_invalid_request(raw: bytes) -> None:
    try:
        decoded = body.decode_object(raw)
    except InvalidRequest:
        return
    assert decoded == json.loads(raw)


@given(st.fixed_dictionaries({}, optional=dict.fromkeys(requests.ChatRequest.__struct_fields__, JSON_VALUES)))
def test_any_object_is_a_request_or_raises_invalid_request_with_a_param(value: dict[str, object]) -> None:
    """Finding the rule for the message never fails, wherever the fault stands."""
    error = None
    try:
        body.read(json.dumps(value).encode(), requests.ChatRequest)
    except InvalidRequest as caught:
        error = caught
    assert error is None or (error.param is not None and error.message.startswith(error.param))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "null"),
        (True, "true"),
        (3.5, "3.5"),
        (2**64 - 1, "18446744073709551615"),
        (-(10**30), "-1" + "0" * 30),
        (10**999, "1" + "0" * 63 + "…"),
        ("a\n\x00'é", '"a\\n\\u0000\'é"'),
        ("x" * 10**6, '"' + "x" * 63 + "…"),
        ([1] * 1000, "a list of 1000"),
        ({"a": 1}, "an object"),
    ],
)
def test_values_are_shown_short_and_as_json(value: object, text: str) -> None:
    assert body.shown(value) == text


def test_messages_name_field_rule_and_value() -> None:
    raw = b'{"model":"m","messages":[{"role":"user","content":"a"},{"role":"robot","content":"b"}]}'
    with pytest.raises(InvalidRequest) as caught:
        body.read(raw, requests.ChatRequest)
    assert caught.value.param == "messages[1].role"
    assert caught.value.message == (
        'messages[1].role must be one of system, developer, user, assistant, tool, got "robot"'
    )


@pytest.mark.parametrize(
    ("raw", "param"),
    [
        (b'{"model":"m","prompt":"a","seed":NaN,"stop":"b"}', "seed"),
        (b'{"model":"m","prompt":"a:,}{\\"","logit_bias":{"stop":[1,{"seed":tru}]}}', "logit_bias"),
        (b'{"model":"m","prompt":["a", "\xff"],"seed":NaN}', "prompt"),  # the first of two
        (b'{"model":"m","\\u0073eed":NaN}', None),  # a field, but not as anybody spells it
        (b'{"model":"m","nobodys":NaN}', None),
        (b'{"model":"m"}{"prompt":NaN}', None),
        (b'[{"model":NaN}]', None),
        (b'{"model":"m","prompt":', None),  # cut off
        (b'{"model":"m","prompt":"' + b'a,:[\\\\\\"' * 300_000 + b'","seed":NaN}', "seed"),  # far behind, and found
        (b'{"prompt":' + b"[" * 40_000, "prompt"),
        (b'{"model":"m","seed":' + b"1" * 1_001 + b',"prompt":"a"}', "seed"),
        (b'{"model":"m","prompt":[[1],[' + b"1," * 9_000 + b"1" * 9_000 + b"]]}", "prompt"),
        (b'{"prompt":[' + b"0," * 30_000 + b"NaN]}", None),  # farther than anybody looks
    ],
)
def test_a_body_that_cannot_be_decoded_names_the_field_that_is_to_blame(raw: bytes, param: str | None) -> None:
    with pytest.raises(InvalidRequest) as caught:
        body.read(raw, requests.CompletionRequest)
    assert caught.value.param == param
    assert param is None or caught.value.message.startswith(f"{param}: the body must ")
