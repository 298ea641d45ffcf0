"""The caller's place in a trace, from the headers of W3C Trace Context.

Read here and not by OpenTelemetry's propagator, which quotes headers that it refuses in warnings of its own: a client
would write lines of the log. What breaks a rule of the specification is as if it had not been sent.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from opentelemetry.context import Context
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, TraceState, set_span_in_context

from tlserve.http.messages import Header

MAX_STATE_LENGTH: Final = 512  # characters; all that the specification asks anyone to carry
MAX_STATE_MEMBERS: Final = 32

_PARENT: Final = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.ASCII)
_MEMBER: Final = re.compile(
    r"([a-z][a-z0-9_*/-]{0,255}|[a-z0-9][a-z0-9_*/-]{0,240}@[a-z][a-z0-9_*/-]{0,13})"
    r"=([\x20-\x2b\x2d-\x3c\x3e-\x7e]{0,255}[\x21-\x2b\x2d-\x3c\x3e-\x7e])"
)


def parent_context(headers: Sequence[Header]) -> Context:
    """The caller's span as the parent of ours; an empty context, which begins a trace, without a valid one."""
    parents = [value for name, value in headers if name == "traceparent"]
    match = _PARENT.fullmatch(parents[0].strip(" \t")) if len(parents) == 1 else None
    if match is None:
        return Context()
    version, trace_id, span_id, flags, rest = match.groups()
    if version == "ff" or (version == "00" and rest) or not int(trace_id, 16) or not int(span_id, 16):
        return Context()
    caller = SpanContext(
        int(trace_id, 16),
        int(span_id, 16),
        is_remote=True,
        trace_flags=TraceFlags(int(flags, 16) & TraceFlags.SAMPLED),  # the one bit that every version has
        trace_state=_state([value for name, value in headers if name == "tracestate"]),
    )
    return set_span_in_context(NonRecordingSpan(caller), Context())


def _state(values: Sequence[str]) -> TraceState:
    """The vendors' own fields, in their order; none of them where one is malformed, named twice, or too many are."""
    text = ",".join(values)
    members = [member for piece in text.split(",") if (member := piece.strip(" \t"))]
    pairs = [match.groups() for member in members if (match := _MEMBER.fullmatch(member))]
    is_valid = len(pairs) == len(members) == len({key for key, _ in pairs})
    if not is_valid or len(members) > MAX_STATE_MEMBERS or len(text) > MAX_STATE_LENGTH:
        return TraceState()
    return TraceState([(key, value) for key, value in pairs])
