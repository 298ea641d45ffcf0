"""How much a body may hold, so that decoding it never keeps the event loop waiting."""

from __future__ import annotations

import json
import sys
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.openai.fakes import Api
from tlserve.errors import InvalidRequest
from tlserve.openai import body, counts, requests


def completion(**fields: object) -> bytes:
    return json.dumps({"model": "m", "prompt": "a", **fields}, separators=(",", ":")).encode()


TOO_MUCH = {
    "lists": (completion(foo=[[]] * 50_000), "50,000 lists and objects, got 50,002"),
    "nested lists": (completion(foo=[[[[]]]] * 20_000), "50,000 lists and objects, got 60,002"),
    "prompts": (completion(prompt=[[]] * 60_000), "50,000 lists and objects, got 60,002"),
    "objects": (completion(foo=[{}] * 50_000), "50,000 lists and objects, got 50,002"),
    "keys": (completion(logit_bias=dict.fromkeys(range(200_000), 1)), "200,000 keys, got 200,003"),
    "values": (completion(foo=[1.0] * 600_000), "600,000 values, got 600,003"),
    "no JSON": (b"{" + b"[" * 50_001, "50,000 lists and objects, got 50,002"),
}


@pytest.mark.parametrize(("raw", "rule"), TOO_MUCH.values(), ids=TOO_MUCH)
def test_a_body_of_too_many_parts_is_refused_by_their_number(raw: bytes, rule: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        body.read(raw, requests.CompletionRequest)
    assert caught.value.message == f"the body must not hold more than {rule}"
    assert caught.value.param is None


async def test_the_refusal_is_a_plain_400() -> None:
    reply = await Api().call("/v1/completions", completion(foo=[[]] * 60_000))
    assert (reply.status, reply.json["error"]["type"]) == (400, "invalid_request_error")


def test_what_a_client_in_good_faith_sends_passes() -> None:
    for raw in (
        completion(prompt=[[7] * 8192] * 64),
        completion(prompt=[[7] * 290] * 2048),
        completion(logit_bias=dict.fromkeys(range(152_000), -100)),
        completion(prompt='{"a": [1, "b\\"]}, ' * 200_000),
    ):
        counts.check_counts(raw)


@pytest.mark.parametrize("text", ["[", "a: b, ", '\\"[', "\\\\", '"', '\\\\",[', "é:漢,"])
def test_marks_inside_strings_do_not_count(text: str) -> None:
    """Wherever the slices are cut that are looked at in turn."""
    for shift in range(3):
        counts.check_counts(completion(prompt="x" * shift + text * 250_000))


@pytest.mark.parametrize("before", [b"", b"-", b"0.", b"1e", b'"a",', b'"' + b"5" * 5_000 + b'",', b"9," * 700])
@pytest.mark.parametrize("slice_bytes", [counts.SLICE_BYTES, 64])
def test_a_number_may_have_a_thousand_digits_wherever_it_stands(
    before: bytes, slice_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counts, "SLICE_BYTES", slice_bytes)
    for shift in range(0, 126, 7):
        start = b'{"a":[' + b" " * shift + before
        counts.check_digits(start + b"1" * 1_000 + b"]}")
        with pytest.raises(InvalidRequest, match=r"^the body must not hold numbers of more than 1,000 digits$"):
            counts.check_digits(start + b"1" * 1_001 + b"]}")


def test_text_may_have_any_number_of_digits() -> None:
    for raw in (
        completion(prompt="1" * 100_000),
        completion(prompt='"\\' + "1" * 100_000),
        completion(a=[12345] * 9_000),
    ):
        counts.check_digits(raw)


@given(st.lists(st.sampled_from([1, 8, 64, 125, 999, 1_000, 1_001, 2_000]), max_size=6), st.data())
def test_the_longest_run_of_digits_is_that_of_the_numbers(lengths: list[int], data: st.DataObject) -> None:
    values = [data.draw(st.sampled_from(["1" * length, int("1" * length)])) for length in lengths]
    raw = json.dumps({"a": values}).encode()
    longest = max((len(str(value)) for value in values if isinstance(value, int)), default=0)
    if longest <= counts.MAX_DIGITS:
        counts.check_digits(raw)
    else:
        with pytest.raises(InvalidRequest):
            counts.check_digits(raw)


VALUES = st.recursive(
    st.none() | st.integers() | st.text(alphabet='a\\"[{,:é\n'),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(alphabet='"\\,:['), inner, max_size=4),
    max_leaves=12,
)


def marks_of(value: object) -> dict[str, int]:
    """The counts of a value and all it holds, by walking it."""
    if not isinstance(value, list | dict):
        return {"lists and objects": 0, "keys": 0, "values": 0}
    inner = list(map(marks_of, value.values() if isinstance(value, dict) else value))
    return {
        "lists and objects": 1 + sum(of["lists and objects"] for of in inner),
        "keys": (len(value) if isinstance(value, dict) else 0) + sum(of["keys"] for of in inner),
        "values": max(len(value), 1) + sum(of["values"] for of in inner),
    }


@given(VALUES)
def test_counts_are_those_of_the_decoded_value(value: object) -> None:
    raw = json.dumps(value, ensure_ascii=False).encode()
    marks_by_name = {what: marks for what, marks, _ in counts.LIMITS}
    with pytest.MonkeyPatch.context() as patch:
        for what, count in marks_of(value).items():
            marks = marks_by_name[what]
            patch.setattr(counts, "LIMITS", ((what, marks, count),))
            counts.check_counts(raw)
            patch.setattr(counts, "LIMITS", ((what, marks, count - 1),))
            with pytest.raises(InvalidRequest, match=f"got {count}"):
                counts.check_counts(raw)


@given(st.text(alphabet='a\\"[,:').map(str.encode))
def test_masking_keeps_the_length_and_the_quotes_that_bound_strings(raw: bytes) -> None:
    masked = counts.mask_escapes(raw)
    assert len(masked) == len(raw)
    assert b'\\"' not in masked
    for at in range(len(raw)):
        if raw[at] != masked[at]:
            assert masked[at : at + 1] == b"_"


def test_reading_a_list_of_floats_lets_other_threads_run() -> None:
    turns, ended = 0, threading.Event()

    def take_turns() -> None:
        nonlocal turns
        while not ended.is_set():
            turns += 1
            time.sleep(0)

    raw = b'{"a":[' + b"1e308," * 100_000 + b"1e308]}"
    interval = sys.getswitchinterval()
    sys.setswitchinterval(0.0005)  # as the server has it
    thread = threading.Thread(target=take_turns)
    thread.start()
    try:
        before = turns
        decoded = body.decode_object(raw)
        after = turns
    finally:
        ended.set()
        thread.join()
        sys.setswitchinterval(interval)
    assert decoded["a"] == [int(1e308)] * 100_001
    assert after - before > 10
