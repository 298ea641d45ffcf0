"""The page of a live server: what docs/metrics.yaml says it has, in the format that was asked for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families as parse_text

from tests.client import Address, Reply, connect, get, metric, post, stream_events, wait_for_metric
from tests.metrics.listed import LISTED
from tests.metrics.open_metrics import parse_open_metrics
from tlserve import ServeConfig, Server, serve
from tlserve.metrics.page import Metrics

SUCC = Path(__file__).parents[2] / "fixtures" / "succ"  # a byte-level bigram: after byte i comes byte i + 1
CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
ENDED = 'tl_engine_ended_choices_total{{reason="{}"}}'

PLAIN = "text/plain; version=0.0.4; charset=utf-8"
OPEN = "application/openmetrics-text; version=1.0.0; charset=utf-8; escaping=allow-utf-8"
# What Prometheus 3 sends.
PROMETHEUS = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
    "application/openmetrics-text;version=0.0.1;q=0.5,"
    "text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
)


def completion(**fields: Any) -> dict[str, Any]:
    return {"model": "succ", "prompt": "a", "max_tokens": 3, "temperature": 0} | fields


async def ask_in_every_way(server: Server) -> None:
    """Requests of each kind, and each way to end that does not take a clock."""
    api = server.http_addr
    messages = [{"role": "user", "content": "a"}]
    for body, status in (
        (completion(), 200),
        (completion(prompt=["a", "b"], stop="d"), 200),  # "bcd" by a stop string, and "cd"
        (completion(max_tokens=10**9), 400),
        (completion(model="other"), 404),
        (completion(suffix="x"), 422),
    ):
        assert (await post(api, COMPLETIONS, body)).status == status
    await stream_events(api, CHAT, {"model": "succ", "messages": messages, "max_tokens": 3})
    assert (await post(api, EMBEDDINGS, {"model": "succ", "input": ["a", "bc"]})).status == 200
    assert (await get(api, "/v1/models/succ")).status == 200
    assert (await get(api, "/nowhere")).status == 404
    assert (await get(api, COMPLETIONS)).status == 405
    async with connect(api) as client:
        await client.start("POST", COMPLETIONS, completion(max_tokens=4000, stream=True))
    await wait_for_metric(server.health_addr, ENDED.format("client_left"), 1)


async def ended(server: Server, reason: str) -> float:
    return await metric(server.health_addr, ENDED.format(reason))


async def page_of(health: Address, accept: str = "") -> Reply:
    return await get(health, "/metrics", [("Accept", accept)] if accept else [])


def names(family: Metric) -> str:
    """A family as queries spell it: the text format's parser takes ``_total`` off."""
    return f"{family.name}_total" if family.type == "counter" else family.name


def values_of(families: Sequence[Metric]) -> Iterator[tuple[str, str, str]]:
    """Every (metric, label, value) of a page, but for the bounds of buckets."""
    for family in families:
        for sample in family.samples:
            for label, value in sample.labels.items():
                if label != "le":
                    yield names(family), label, value


async def test_the_page_is_what_the_documentation_lists() -> None:
    async with serve(ServeConfig.for_model(SUCC)) as server:
        await ask_in_every_way(server)
        families = list(parse_text((await page_of(server.health_addr)).body.decode()))
    assert {names(family): family.type for family in families} == {item["name"]: item["type"] for item in LISTED}
    meanings = {item["name"]: item["meaning"] for item in LISTED if not item["name"].startswith("process_")}
    assert {names(family): family.documentation for family in families if names(family) in meanings} == meanings
    listed = {(item["name"], label) for item in LISTED for label in item.get("labels", {})}
    found = set(values_of(families))
    assert {(name, label) for name, label, _ in found} == listed
    labels = {item["name"]: item.get("labels", {}) for item in LISTED}
    for name, label, value in found:
        assert not isinstance(labels[name][label], list) or value in labels[name][label]


async def test_requests_of_each_kind_are_counted() -> None:
    async with serve(ServeConfig.for_model(SUCC, prefix_cache="off")) as server:
        await ask_in_every_way(server)
        assert [await ended(server, reason) for reason in ("length", "stop", "error")] == [2, 3, 0]

        async def value(name: str) -> float:
            return await metric(server.health_addr, f"tl_engine_{name}")

        histograms = ("request_duration_seconds", "queue_time_seconds", "prompt_tokens", "time_to_first_token_seconds")
        assert [await value(f"{name}_count") for name in histograms] == [5, 5, 5, 4]
        num_prompt = 1 + 2 + 1 + 3 + 1
        assert await value("prompt_tokens_sum") == await value('tokens_total{kind="prompt_computed"}') == num_prompt
        assert await value('tokens_total{kind="prompt_cached"}') == 0
        assert await value('tokens_total{kind="generated"}') >= await value("generation_tokens_sum") > 3 + 3 + 2 + 3
        assert await value("step_duration_seconds_count") >= 3 + 3 + 3 + 1
        for method, route, status, count in (
            ("POST", COMPLETIONS, 200, 3),
            ("POST", COMPLETIONS, 422, 1),
            ("POST", CHAT, 200, 1),
            ("GET", "/v1/models/{id:path}", 200, 1),
            ("GET", COMPLETIONS, 405, 1),
            ("GET", "none", 404, 1),
        ):
            labels = f'method="{method}",route="{route}",status="{status}"'
            assert await value(f"http_requests_total{{{labels}}}") == count, labels


async def test_cached_tokens_are_counted_apart() -> None:
    async with serve(ServeConfig.for_model(SUCC)) as server:
        for _ in range(2):
            await post(server.http_addr, COMPLETIONS, completion(prompt="a" * 33))
        kinds = ("prompt_computed", "prompt_cached")
        sample = 'tl_engine_tokens_total{{kind="{}"}}'
        assert [await metric(server.health_addr, sample.format(kind)) for kind in kinds] == [34, 32]


async def test_the_page_says_what_runs() -> None:
    config = ServeConfig.for_model(SUCC, kv_dtype="f32", num_blocks=99, max_model_len=500)
    async with serve(config) as server:
        families = {names(family): family for family in parse_text((await page_of(server.health_addr)).body.decode())}
    (model,) = families["tl_engine_model_info"].samples
    expected = {"model_id": "succ", "architecture": "bigram", "kv_dtype": "f32", "num_blocks": "99"}
    assert model.labels | expected | {"max_model_len": "500"} == model.labels
    (build,) = families["tl_engine_build_info"].samples
    assert all(build.labels[name] for name in ("version", "python", "instruction_set"))


@pytest.mark.parametrize(
    ("accept", "content_type"),
    [
        ("", PLAIN),
        ("*/*", PLAIN),
        ("text/html,application/xhtml+xml;q=0.9", PLAIN),
        ("text/plain;version=0.0.4", PLAIN),
        ("application/openmetrics-text", "application/openmetrics-text; version=1.0.0; charset=utf-8"),
        (PROMETHEUS, OPEN),
        ("Application/OpenMetrics-Text;Version=1.0.0;escaping=Allow-UTF-8", OPEN),
        ('application/openmetrics-text;version="1.0.0";escaping=allow-utf-8', OPEN),
        ("application/openmetrics-text;q=0, text/plain", PLAIN),
        ("application/openmetrics-text; q=0.000", PLAIN),
        ("application/openmetrics-text;q=0.3, text/plain;version=0.0.4;q=0.4", PLAIN),
        ("text/plain;q=0.3, application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.4", OPEN),
        ("application/openmetrics-text;version=0.0.1", PLAIN),
        ("application/openmetrics-text;version=1.0.1", PLAIN),
        ("application/openmetrics-text;version=1.0.0;q=nan", PLAIN),
        # No scraper's, and no reason for a fault
        ("application/openmetrics-text;version=abc", PLAIN),
        ("application/openmetrics-text;version=1.0.0.\xe9", PLAIN),
        ("application/openmetrics-text;version=" + "9" * 5000, PLAIN),
        ("text/plain;version=", PLAIN),
        (";;;,,,===", PLAIN),
    ],
)
def test_the_format_is_the_one_that_is_asked_for(accept: str, content_type: str) -> None:
    page, found = Metrics().page(accept)
    assert found == content_type
    assert page.endswith(b"# EOF\n") == (content_type != PLAIN)
    assert (b"_created" in page) == (content_type != PLAIN)


async def test_exemplars_name_the_request() -> None:
    async with serve(ServeConfig.for_model(SUCC)) as server:
        await post(server.http_addr, COMPLETIONS, completion(), [("X-Request-Id", "mine")])
        reply = await page_of(server.health_addr, PROMETHEUS)
    assert reply.headers["content-type"] == OPEN
    families = parse_open_metrics(reply.body)
    exemplars = {
        family.name: sample.exemplar.labels for family in families for sample in family.samples if sample.exemplar
    }
    assert exemplars["tl_engine_time_to_first_token_seconds"]["request_id"] == "mine"
    assert exemplars["tl_engine_request_duration_seconds"]["request_id"] == "mine"


async def test_servers_of_one_process_count_apart() -> None:
    config = ServeConfig.for_model(SUCC)
    async with serve(config) as first, serve(config) as second:
        await post(first.http_addr, COMPLETIONS, completion())
        assert (await ended(first, "length"), await ended(second, "length")) == (1, 0)
