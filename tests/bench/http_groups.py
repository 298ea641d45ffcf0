"""The rows that are measured over HTTP, all by ``trio-tlserve load``, whoever answers."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from tests.bench.commands import ROOT, ours
from tests.bench.groups import Context, Group, Samples
from tests.bench.results import Row
from tests.bench.servers import HealthPoller, RunningServer, free_port, llama_server, our_server, running

PROMPT, GENERATED = 128, 128
STREAM_CONTEXT = 512  # tokens of KV cache for each stream, on both sides
BLOCK_SIZE = 16
SUCC = ROOT / "fixtures" / "succ"
EVENTS = ("--concurrency", "16", "--requests", "96", "--prompt-tokens", "8", "--max-tokens", "1000")


def load(server: RunningServer, *arguments: str) -> Any:
    """The figures of one run against a server."""
    return ours("load", "--base-url", server.base_url, "--endpoint", "completions", *arguments)


def streams_load(server: RunningServer, streams: int) -> Any:
    shape = ("--prompt-tokens", str(PROMPT), "--max-tokens", str(GENERATED))
    return load(server, "--concurrency", str(streams), "--requests", str(max(4, 3 * streams)), *shape)


def num_blocks(streams: int) -> int:
    return streams * STREAM_CONTEXT // BLOCK_SIZE


def measure_streams(kind: str, context: Context) -> Samples:
    """16 streams, and what the same two processes say of start, memory and health."""
    file = context.file(kind)
    threads = context.threads
    keys = {"threads": threads, "num_blocks": num_blocks(16), "max_num_seqs": 16}
    with our_server(file, **keys) as server:
        with HealthPoller(server.port) as health:
            mine = streams_load(server, 16)
        ready, memory = server.ready_seconds, server.peak_memory
    with llama_server(context.llama, file, threads=threads, streams=16, context=16 * STREAM_CONTEXT) as server:
        theirs = streams_load(server, 16)
        their_ready, their_memory = server.ready_seconds, server.peak_memory
    return {
        f"http-{kind}-16": (mine["tokens_per_second"], theirs["tokens_per_second"]),
        f"http-{kind}-16-ttft": (mine["ttft_ms"]["p50"], theirs["ttft_ms"]["p50"]),
        f"http-{kind}-16-itl": (mine["itl_ms"]["p99"], theirs["itl_ms"]["p99"]),
        f"http-{kind}-health": (float(np.percentile(health.seconds, 99)) * 1000, None),
        f"http-{kind}-ready": (ready, their_ready),
        f"http-{kind}-memory": (memory / (1 << 20), their_memory / (1 << 20)),
    }


def streams_group(kind: str, floor: float) -> Group:
    what = f"{kind} over HTTP, 16 streams of {PROMPT} + {GENERATED} tokens"
    is_main = kind == "Q4_1"
    rows = (
        Row(f"http-{kind}-16", what, "tokens/s", "at least", floor),
        Row(f"http-{kind}-16-ttft", f"{what}: time to first token, p50", "ms", "at most" if is_main else "", 0.5),
        Row(f"http-{kind}-16-itl", f"{what}: between tokens, p99", "ms"),
        Row(f"http-{kind}-health", f"{what}: /healthz, p99", "ms", digits=1),
        Row(f"http-{kind}-ready", f"{kind}: from the start of the process to ready", "s", digits=2),
        Row(f"http-{kind}-memory", f"{kind}: peak memory, 16 x 512 tokens", "MiB", "at most" if is_main else "", 1.3),
    )
    how = (
        "trio-tlserve load --endpoint completions --concurrency 16 --requests 48 --prompt-tokens 128 --max-tokens 128, "
        "against trio-tlserve and llama-server -np 16 -c 8192"
    )
    return Group(rows, lambda context: measure_streams(kind, context), how)


def measure_one_stream(context: Context) -> Samples:
    keys = {"threads": context.threads, "num_blocks": num_blocks(1), "max_num_seqs": 1}
    with our_server(context.model, **keys) as server:
        mine = streams_load(server, 1)
    with llama_server(
        context.llama, context.model, threads=context.threads, streams=1, context=STREAM_CONTEXT
    ) as server:
        theirs = streams_load(server, 1)
    return {"http-Q4_1-1": (mine["tokens_per_second"], theirs["tokens_per_second"])}


ONE_STREAM = Group(
    (Row("http-Q4_1-1", "Q4_1 over HTTP, 1 stream of 128 + 128 tokens", "tokens/s", "at least", 2.2),),
    measure_one_stream,
    "trio-tlserve load --endpoint completions --requests 4, against trio-tlserve and llama-server -np 1",
)


def measure_overhead(context: Context) -> Samples:
    """What HTTP costs: the same work in the engine alone, prompts included."""
    threads = str(context.threads)
    shape = ("-npl", "16", "-npp", str(PROMPT), "-ntg", str(GENERATED))
    alone = ours("bench", "--model-dir", context.model, "--threads", threads, "-p", "0", "-n", "0", "-r", "3", *shape)
    keys = {"threads": context.threads, "num_blocks": num_blocks(16), "max_num_seqs": 16}
    with our_server(context.model, **keys) as server:
        served = streams_load(server, 16)
    engine_rate = 16 * GENERATED / alone["batched"][0]["t"]
    return {"http-overhead": (served["tokens_per_second"], engine_rate)}


OVERHEAD = Group(
    (
        Row(
            "http-overhead",
            "Q4_1 over HTTP, 16 streams, over our engine alone",
            "tokens/s",
            "at least",
            0.85,
            theirs="our engine alone",
        ),
    ),
    measure_overhead,
    "the same load; trio-tlserve bench -p 0 -n 0 -npl 16 -npp 128 -ntg 128",
    needs_peer=False,
)


def measure_events(context: Context) -> Samples:
    with our_server(SUCC, max_num_seqs=16) as server:
        mine = load(server, *EVENTS)
    port = free_port()
    command = [sys.executable, "-m", "hypercorn", "--worker-class", "trio", "--bind", f"127.0.0.1:{port}"]
    with running([*command, "tests.bench.events_app:app"], port, "/v1/models", port) as server:
        theirs = load(server, *EVENTS)
    return {"http-events": (mine["events_per_second"], theirs["events_per_second"])}


EVENTS_ALONE = Group(
    (
        Row(
            "http-events",
            "HTTP alone: events of the bigram model, 16 streams",
            "events/s",
            "at least",
            1,
            theirs="Hypercorn's trio worker and Starlette",
        ),
    ),
    measure_events,
    f"trio-tlserve load --endpoint completions {' '.join(EVENTS)}",
    needs_peer=False,
)


def measure_ceiling(context: Context) -> Samples:
    port = free_port()
    with running([sys.executable, "-m", "tests.bench.ceiling_app", str(port)], port, "/v1/models", port) as server:
        return {"ceiling": (load(server, *EVENTS)["events_per_second"], None)}


CEILING = Group(
    (Row("ceiling", "What trio-tlserve load itself can take, from a server that computes nothing", "events/s"),),
    measure_ceiling,
    "trio-tlserve load against tests/bench/ceiling_app.py",
    needs_peer=False,
)
