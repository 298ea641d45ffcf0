"""What a request counts as once it has ended, case by case."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from tests.metrics.open_metrics import parse_open_metrics, write_open_metrics
from tlserve.http.access import Outcome, RequestRecord
from tlserve.http.messages import Note
from tlserve.metrics.requests import EXEMPLAR_CHARACTERS, REASONS, RequestMetrics, end_reasons

SERVED: dict[str, Note] = {
    "queue_seconds": 0.01,
    "first_token_seconds": 0.2,
    "token_seconds": 0.03,
    "prompt_tokens": 7,
    "cached_tokens": 0,
    "completion_tokens": 9,
    "finish": "length",
}
HISTOGRAMS = (
    "queue_time_seconds",
    "time_to_first_token_seconds",
    "time_per_output_token_seconds",
    "request_duration_seconds",
    "prompt_tokens",
    "generation_tokens",
)


def record(notes: dict[str, Note] | None = None, **fields: Any) -> RequestRecord:
    values: dict[str, Any] = {
        "server": "api",
        "request_id": "mine",
        "method": "POST",
        "route": "/v1/completions",
        "status": 200,
        "duration": 0.5,
        "outcome": Outcome.COMPLETE,
    }
    return RequestRecord(**values | fields, notes=notes or {})


class Counted:
    """A registry that has seen some requests."""

    def __init__(self, *records: RequestRecord) -> None:
        self.registry = CollectorRegistry()
        metrics = RequestMetrics(self.registry)
        for each in records:
            metrics.observe(each)

    def value(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(f"tl_engine_{name}", labels)

    def reasons(self) -> dict[str, float]:
        """Those that have been counted."""
        counts = {reason: self.value("ended_choices_total", reason=reason) or 0.0 for reason in REASONS}
        return {reason: count for reason, count in counts.items() if count}

    def observed(self) -> set[str]:
        """The histograms that have an observation."""
        return {name for name in HISTOGRAMS if self.value(f"{name}_count")}


def test_a_served_request_is_one_observation_of_each_kind() -> None:
    counted = Counted(record(SERVED))
    assert counted.reasons() == {"length": 1}
    assert counted.observed() == set(HISTOGRAMS)
    sums = {name: counted.value(f"{name}_sum") for name in HISTOGRAMS}
    assert list(sums.values()) == [0.01, 0.2, 0.03, 0.5, 7, 9]
    assert counted.value("http_requests_total", method="POST", route="/v1/completions", status="200") == 1


def test_each_choice_counts_by_its_reason_and_the_request_once() -> None:
    counted = Counted(record(SERVED | {"finish": "stop,length,stop"}))
    assert counted.reasons() == {"stop": 2, "length": 1}
    assert counted.value("prompt_tokens_count") == counted.value("request_duration_seconds_count") == 1


def test_embeddings_have_no_tokens_of_their_own() -> None:
    counted = Counted(record({"queue_seconds": 0.1, "prompt_tokens": 4, "cached_tokens": 0, "finish": "stop"}))
    assert counted.reasons() == {"stop": 1}
    assert counted.observed() == {"queue_time_seconds", "request_duration_seconds", "prompt_tokens"}


@pytest.mark.parametrize(
    ("status", "outcome", "error", "reason"),
    [
        (None, Outcome.CLIENT_LEFT, None, "client_left"),
        (200, Outcome.WRITE_TIMEOUT, None, "write_timeout"),
        (503, Outcome.COMPLETE, "no_capacity", "queue_deadline"),
        (503, Outcome.COMPLETE, "shutting_down", "shutdown"),
        (200, Outcome.FAILED, "shutting_down", "shutdown"),
        (500, Outcome.COMPLETE, "internal_error", "error"),
        (200, Outcome.FAILED, "something_new", "error"),
    ],
)
def test_choices_that_were_cut_short_say_by_what(
    status: int | None, outcome: Outcome, error: str | None, reason: str
) -> None:
    cut = record(SERVED | {"finish": "stop,none", "error": error}, status=status, outcome=outcome)
    assert Counted(cut).reasons() == {"stop": 1, reason: 1}
    assert reason in REASONS


def test_a_request_that_found_the_queue_full_counts_once_and_is_not_timed() -> None:
    """Whether it was turned away before or after its prompts were known."""
    error: dict[str, Note] = {"error": "rate_limit_exceeded"}
    for notes in (error, SERVED | {"finish": "none,none"} | error):
        counted = Counted(record(notes, status=429))
        assert counted.reasons() == {"queue_full": 1}
        assert counted.observed() == set()


@pytest.mark.parametrize("status", [400, 401, 404, 405, 408, 413, 422])
def test_a_request_that_is_refused_for_what_it_says_is_an_http_request_and_nothing_else(status: int) -> None:
    refused = Counted(record({"finish": "none"} if status == 400 else {}, status=status))
    assert refused.reasons() == {}
    assert refused.observed() == set()
    assert refused.value("http_requests_total", method="POST", route="/v1/completions", status=str(status)) == 1


def test_other_routes_are_http_requests_and_nothing_else() -> None:
    counted = Counted(record(method="GET", route="/v1/models"))
    assert (counted.reasons(), counted.observed()) == ({}, set())


def test_a_client_that_leaves_in_the_queue_has_a_duration_and_no_first_token() -> None:
    notes: dict[str, Note] = {"prompt_tokens": 3, "cached_tokens": 0, "completion_tokens": 0, "finish": "none"}
    counted = Counted(record(notes, status=None, outcome=Outcome.CLIENT_LEFT))
    assert counted.observed() == {"request_duration_seconds", "prompt_tokens", "generation_tokens"}
    assert counted.value("http_requests_total", method="POST", route="/v1/completions", status="none") == 1


def test_no_method_or_path_of_a_client_becomes_a_label() -> None:
    counted = Counted(*(record(method=method, route="", status=404) for method in ("BREW", "X" * 1000, "")))
    assert counted.value("http_requests_total", method="other", route="none", status="404") == 3


def test_every_reason_is_on_the_page_before_its_first_time() -> None:
    counted = Counted()
    assert [counted.value("ended_choices_total", reason=reason) for reason in REASONS] == [0.0] * len(REASONS)


@pytest.mark.parametrize("request_id", ["mine", "x" * 128])
@pytest.mark.parametrize("trace_id", [None, "4bf92f3577b34da6a3ce929d0e0e4736"])
def test_an_exemplar_leads_to_the_trace_and_to_the_log_as_far_as_there_is_room(
    request_id: str, trace_id: str | None
) -> None:
    counted = Counted(record(SERVED | {"trace_id": trace_id}, request_id=request_id))
    families = {family.name: family for family in parse_open_metrics(write_open_metrics(counted.registry))}
    expected = {} if trace_id is None else {"trace_id": trace_id}
    expected |= {"request_id": request_id} if len(request_id) < 128 else {}
    assert sum(map(len, [*expected, *expected.values()])) <= EXEMPLAR_CHARACTERS
    for name in HISTOGRAMS:
        found = [sample.exemplar.labels for sample in families[f"tl_engine_{name}"].samples if sample.exemplar]
        assert found == ([expected] if expected else [])


def test_a_request_that_broke_after_its_last_choice_has_ended_as_that_choice_did() -> None:
    assert end_reasons(record(SERVED | {"finish": "stop"}, outcome=Outcome.CLIENT_LEFT)) == ["stop"]
