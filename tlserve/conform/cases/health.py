"""The health port: alive, ready, and what its gauges say."""

from __future__ import annotations

import re

import trio

from tlserve.conform.case import Cases
from tlserve.conform.found import Found
from tlserve.conform.subject import CHAT, Subject

CASES = Cases("closing.md#the-server")
BLOCKS = "engine.md#the-tokens-of-a-request-and-who-frees-their-blocks"
GAUGES = (
    'tl_engine_kv_blocks{state="free"}',
    'tl_engine_kv_blocks{state="used"}',
    'tl_engine_kv_blocks{state="cached"}',
    "tl_engine_queue_depth",
    "tl_engine_active_sequences",
    "tl_engine_batch_tokens",
    "tl_engine_prefix_cache_hit_ratio",
    "tl_engine_preemptions_total",
    "tl_engine_kv_evictions_total",
)
USED, ACTIVE, QUEUED = GAUGES[1], GAUGES[4], GAUGES[3]
NUM_STREAMS = 16
ENOUGH = 5  # answers beside work


@CASES.add("health.alive", "/healthz on the health port is 200, for HEAD too", needs_health=True)
async def alive(server: Subject) -> None:
    for method in ("GET", "HEAD"):
        (await server.health("/healthz", method)).has_status(200)


@CASES.add("health.ready", "/readyz is 200 with a JSON body while the server takes requests", needs_health=True)
async def ready(server: Subject) -> None:
    answer = (await server.health("/readyz")).has_status(200)
    answer.document.check(bool(answer.document.value), "words in it")


@CASES.add("health.errors", "errors of the health port have the error document and X-Request-Id", needs_health=True)
async def errors(server: Subject) -> None:
    unknown = await server.health("/no-such-route")
    unknown.refuses(404, code="route_not_found")
    unknown.header("x-request-id").text()
    (await server.health("/metrics", "POST")).refuses(405, code="method_not_allowed")


@CASES.add("health.under_load", "/healthz answers while 16 streams run", needs_health=True)
async def under_load(server: Subject) -> None:
    """Were they waited for, there would be one answer at the most before the first of them ends."""
    body = server.chat_body(max_tokens=256, ignore_eos=True)
    ended = trio.Event()
    num_answers = 0

    async def run() -> None:
        await server.stream(CHAT, body)
        ended.set()

    async with trio.open_nursery() as nursery:
        for _ in range(NUM_STREAMS):
            nursery.start_soon(run)
        while num_answers < ENOUGH and not ended.is_set():
            answer = (await server.health("/healthz")).has_status(200)
            num_answers += not ended.is_set()
        nursery.cancel_scope.cancel()
    Found(num_answers, "answers before a stream ended", answer.sent).check(num_answers == ENOUGH, f"{ENOUGH}")


@CASES.add(
    "metrics.gauges",
    "/metrics is Prometheus text and has every gauge and counter of the engine",
    page=BLOCKS,
    needs_health=True,
)
async def gauges(server: Subject) -> None:
    answer = (await server.health("/metrics")).has_status(200)
    kind = answer.header("content-type")
    kind.check(kind.text().split(";")[0] in ("text/plain", "application/openmetrics-text"), "text/plain")
    page = answer.body.decode("utf-8", "replace")
    for name in GAUGES:
        if not re.search(rf"^{re.escape(name)} [0-9.e+-]+$", page, re.MULTILINE):
            answer.fail(f"a sample {name}", "none")


@CASES.add(
    "metrics.idle", "without requests no block is used, nothing runs and nothing waits", page=BLOCKS, needs_health=True
)
async def idle(server: Subject) -> None:
    await server.chat(max_tokens=4)
    for name in (USED, ACTIVE, QUEUED):
        Found(await server.gauge(name), name, server.last_sent).equals(0.0)


@CASES.add("metrics.busy", "while a stream runs it is active and holds blocks", page=BLOCKS, needs_health=True)
async def busy(server: Subject) -> None:
    body = server.chat_body(max_tokens=min(1500, await server.context() - 200), ignore_eos=True)
    async with server.started(CHAT, body):
        for name in (ACTIVE, USED):
            value = await server.gauge(name)
            Found(value, name, server.last_sent).check(value >= 1, "1 or more")


@CASES.add("metrics.hit_ratio", "the hit ratio is from 0 to 1", page=BLOCKS, needs_health=True)
async def hit_ratio(server: Subject) -> None:
    value = await server.gauge("tl_engine_prefix_cache_hit_ratio")
    Found(value, "tl_engine_prefix_cache_hit_ratio", server.last_sent).check(0 <= value <= 1, "from 0 to 1")
