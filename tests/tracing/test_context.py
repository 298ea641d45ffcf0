"""traceparent and tracestate: what W3C Trace Context lets in, and that nothing else gets in or into the log."""

from __future__ import annotations

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.trace import get_current_span

from tlserve.http.messages import Header
from tlserve.tracing.context import MAX_STATE_LENGTH, MAX_STATE_MEMBERS, parent_context

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
SPAN_ID = "b7ad6b7169203331"
GOOD = f"00-{TRACE_ID}-{SPAN_ID}-01"
ZEROS = "0" * 32


def parent(*headers: Header) -> str | None:
    """The caller's place as a traceparent; None where a trace begins with us."""
    span = get_current_span(parent_context(headers)).get_span_context()
    return f"{span.trace_id:032x}-{span.span_id:016x}-{span.trace_flags:02x}" if span.is_valid else None


def state(*values: str) -> list[tuple[str, str]]:
    headers = [("traceparent", GOOD), *(("tracestate", value) for value in values)]
    return list(get_current_span(parent_context(headers)).get_span_context().trace_state.items())


@pytest.mark.parametrize(
    ("value", "flags"),
    [
        (GOOD, "01"), (f" {GOOD}\t", "01"), (GOOD[:-2] + "00", "00"), (GOOD[:-2] + "ff", "01"),
        (GOOD[:-2] + "02", "00"), ("01" + GOOD[2:], "01"), ("cc" + GOOD[2:] + "-what.comes-later", "01"),
    ],
)  # fmt: skip
def test_a_caller_that_keeps_the_rules_is_the_parent(value: str, flags: str) -> None:
    assert parent(("host", "x"), ("traceparent", value)) == f"{TRACE_ID}-{SPAN_ID}-{flags}"


@pytest.mark.parametrize(
    "value",
    [
        "", "00", GOOD.upper(), GOOD + "-", GOOD + "-more", GOOD + "0", "ff" + GOOD[2:], "cc" + GOOD[2:] + ".more",
        GOOD[:-1], GOOD.replace("-", "_"), GOOD.replace(TRACE_ID, ZEROS), GOOD.replace(SPAN_ID, ZEROS[:16]),
        f"{GOOD},{GOOD}", GOOD + "\n", GOOD.replace("0a", "\u0660a"), "x" * 100_000,
    ],
)  # fmt: skip
def test_anything_else_is_as_if_it_had_not_been_sent(value: str) -> None:
    assert parent(("traceparent", value), ("tracestate", "a=b")) is None


def test_a_place_that_is_given_twice_is_none() -> None:
    assert parent(("traceparent", GOOD), ("traceparent", GOOD)) is None
    assert parent(("tracestate", "a=b")) is None


@pytest.mark.parametrize(
    ("values", "pairs"),
    [
        ([], []),
        (["a=b"], [("a", "b")]),
        (["b=2,a=1", "t@v=3"], [("b", "2"), ("a", "1"), ("t@v", "3")]),
        ([" a=b ,\t,, c= d!"], [("a", "b"), ("c", " d!")]),
        ([",".join(f"k{n}=v" for n in range(MAX_STATE_MEMBERS))], [(f"k{n}", "v") for n in range(MAX_STATE_MEMBERS)]),
    ],
)
def test_the_fields_of_vendors_keep_their_order(values: list[str], pairs: list[tuple[str, str]]) -> None:
    assert state(*values) == pairs


@pytest.mark.parametrize(
    "value",
    [
        "a", "a=", "=b", "A=b", "a=b=c", "a=b,a=c", "a b=c", "a=\u00e9", "a=b\x7f", "@v=1", "a@=1", "a=b,c",
        ",".join(f"k{n}=v" for n in range(MAX_STATE_MEMBERS + 1)),
        "a=" + "x" * 257,
        ",".join(f"k{n}={'x' * 200}" for n in range(MAX_STATE_LENGTH // 200 + 1)),
    ],
)  # fmt: skip
def test_fields_that_break_a_rule_go_together_and_the_parent_stays(value: str) -> None:
    assert state("ok=1", value) == []
    assert parent(("traceparent", GOOD), ("tracestate", value)) is not None


class Lines(logging.Handler):
    """What would have been written."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@given(st.text(st.characters(max_codepoint=255)), st.lists(st.text(st.characters(max_codepoint=255))))
def test_no_header_raises_or_writes_into_the_log(value: str, states: list[str]) -> None:
    handler = Lines()
    root = logging.getLogger()
    root.addHandler(handler)
    try:
        for given_parent in (value, GOOD):
            parent(("traceparent", given_parent), *(("tracestate", state) for state in states))
    finally:
        root.removeHandler(handler)
    assert handler.lines == []
