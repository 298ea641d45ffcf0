"""What is counted of requests, once each has ended: the same material as its line in the log.

Rule 1: every request of the API port counts once in http_requests, however it ended.
Rule 2: a request that the engine took in has a word for the end of each of its choices in ``notes["finish"]``, and
        each counts once in ended_choices. The inputs of an embeddings request are one choice together. A request
        that found the queue full counts as one choice too; what is refused otherwise has none.
Rule 3: a request that the engine took in is one observation in each histogram whose time or count it came to,
        however many choices it has: their tokens are added up.
Rule 4: no label has a value of a client's making. Routes are patterns, methods and reasons are lists, statuses
        are ours. Exemplars, of which a bucket keeps one, do carry the request id.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram

# Seconds: from a step of a tiny model to the longest that somebody may wait for.
SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
# Seconds a token: fine where people read along, which is 10 to 100 tokens/s.
TOKEN_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2.5, 10)
TOKENS = tuple(2**power for power in range(18))  # 1 to 131,072

METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"})

# Why a choice that did not come to its own end was ended, by the error that its request met.
_REASON_OF_ERROR = {
    "no_capacity": "queue_deadline",
    "shutting_down": "shutdown",
    "internal_error": "error",
}
_DEPARTURES = ("client_left", "write_timeout")
REASONS = ("stop", "length", *_DEPARTURES, "queue_full", *_REASON_OF_ERROR.values())

EXEMPLAR_CHARACTERS = 128  # of names and values together: OpenMetrics' limit


class EndedRequest(Protocol):
    """A finished request, as the HTTP server reports it."""

    @property
    def request_id(self) -> str: ...

    @property
    def method(self) -> str: ...

    @property
    def route(self) -> str:
        """The pattern that matched; "" where none did."""

    @property
    def status(self) -> int | None: ...

    @property
    def duration(self) -> float: ...

    @property
    def outcome(self) -> enum.Enum: ...

    @property
    def notes(self) -> Mapping[str, str | int | float | None]: ...


class RequestMetrics:
    """The metrics of requests in one registry. ``observe`` takes a constant time, some microseconds."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._http_requests = Counter(
            "tl_engine_http_requests",
            "Requests of the API port that have ended.",
            ["method", "route", "status"],
            registry=registry,
        )
        self._ended = Counter(
            "tl_engine_ended_choices", "Choices that have ended, by reason.", ["reason"], registry=registry
        )
        for reason in REASONS:
            self._ended.labels(reason)  # a rate needs the zero before the first one
        # By the note that each observes; the duration is no note.
        self._histograms = {
            note: Histogram(f"tl_engine_{name}", documentation, buckets=buckets, registry=registry)
            for note, name, documentation, buckets in (
                ("queue_seconds", "queue_time_seconds", "Time until a request began to run.", SECONDS),
                (
                    "first_token_seconds",
                    "time_to_first_token_seconds",
                    "Time from accepting a request to its first token.",
                    SECONDS,
                ),
                (
                    "token_seconds",
                    "time_per_output_token_seconds",
                    "Mean time between the tokens of a request after its first.",
                    TOKEN_SECONDS,
                ),
                ("prompt_tokens", "prompt_tokens", "Prompt tokens of a request.", TOKENS),
                ("completion_tokens", "generation_tokens", "Tokens generated for a request.", TOKENS),
            )
        }
        self._duration = Histogram(
            "tl_engine_request_duration_seconds",
            "Time from the first byte of a request to the end of its answer.",
            buckets=SECONDS,
            registry=registry,
        )

    def observe(self, record: EndedRequest) -> None:
        """Count a request that has ended."""
        method = record.method if record.method in METHODS else "other"
        self._http_requests.labels(method, record.route or "none", str(record.status or "none")).inc()
        reasons = end_reasons(record)
        for reason in reasons:
            self._ended.labels(reason).inc()
        if reasons and reasons != ["queue_full"]:
            self._observe_served(record)

    def _observe_served(self, record: EndedRequest) -> None:
        exemplar = _exemplar(record)
        self._duration.observe(record.duration, exemplar)
        for note, histogram in self._histograms.items():
            value = record.notes.get(note)
            if isinstance(value, int | float):
                histogram.observe(value, exemplar)


def end_reasons(record: EndedRequest) -> list[str]:
    """Why each choice ended; empty for a request that was refused for what it says, or never came so far."""
    finish, status = record.notes.get("finish"), record.status or 0
    if status == 429:
        return ["queue_full"]
    if finish is None or 400 <= status < 500:
        return []
    return [_cut_short(record) if word == "none" else word for word in str(finish).split(",")]


def _cut_short(record: EndedRequest) -> str:
    reason = _REASON_OF_ERROR.get(str(record.notes.get("error")))
    if reason is None and record.outcome.value in _DEPARTURES:
        reason = str(record.outcome.value)
    return reason or "error"


def _exemplar(record: EndedRequest) -> dict[str, str]:
    """What leads from a bucket to a trace and to a line of the log, as far as there is room."""
    labels: dict[str, str] = {}
    for name, value in (("trace_id", record.notes.get("trace_id")), ("request_id", record.request_id)):
        length = sum(map(len, [name, str(value), *labels, *labels.values()]))
        if value is not None and length <= EXEMPLAR_CHARACTERS:
            labels[name] = str(value)
    return labels
