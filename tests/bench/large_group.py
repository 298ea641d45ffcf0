"""A model far larger than any cache: the synthetic file of the shape of Qwen3-8B."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np

from tests.bench.commands import ours
from tests.bench.groups import Context, Group, Samples, bytes_per_token
from tests.bench.http_groups import load
from tests.bench.machine import read_bandwidth
from tests.bench.results import Row
from tests.bench.servers import our_server
from tests.bench.synthetic import HEAD_DIM, KV_HEADS, LAYERS, write_model

BLOCK_SIZE = 16
NUM_BLOCKS = 256
KV_BYTES = NUM_BLOCKS * BLOCK_SIZE * LAYERS * 2 * KV_HEADS * HEAD_DIM * 2  # keys and values, in f16


def measure(context: Context) -> Samples:
    file = write_model(context.cache_dir / "synthetic-qwen3-8b.Q4_0.gguf")
    return _speed(context, file) | _footprint(context, file)


def _speed(context: Context, file: Path) -> Samples:
    threads = str(context.threads)
    batched = ("-npl", "8", "-npp", "64", "-ntg", "32")
    mine = ours("bench", "--model-dir", file, "--threads", threads, "-p", "64", "-n", "32", "-r", "1", *batched)
    theirs = context.llama.bench(file, context.threads, "-p", "64", "-n", "32", "-r", "1")
    their_batch = context.llama.batched(file, context.threads, streams=8, num_prompt=64, num_generated=32)
    decode = mine["tests"][1]["avg_ts"]
    return {
        "8b-pp64": (mine["tests"][0]["avg_ts"], theirs[0]["avg_ts"]),
        "8b-tg32": (decode, theirs[1]["avg_ts"]),
        "8b-tg8": (mine["batched"][0]["speed_tg"], their_batch["speed_tg"]),
        "8b-bandwidth": (decode * bytes_per_token(file) / 1e9, read_bandwidth(context.threads) / 1e9),
    }


def _footprint(context: Context, file: Path) -> Samples:
    """Start and memory. Both the read and the start find the file on disk, and memory that was in use just before.

    A virtual machine may give memory that is free for seconds back to its host, and gets it again page by page.
    Touching 4.3 GB can take 9 s then, whoever does it, which says nothing about either side.
    """
    _set_out(file)
    start = time.perf_counter()
    _read(file)
    read_seconds = time.perf_counter() - start
    _set_out(file)
    with our_server(file, threads=context.threads, num_blocks=NUM_BLOCKS, max_num_seqs=8) as server:
        load(server, "--concurrency", "8", "--requests", "8", "--prompt-tokens", "400", "--max-tokens", "8")
        ready_seconds, memory = server.ready_seconds, server.peak_memory
    needed = file.stat().st_size + KV_BYTES
    return {
        "8b-ready": (ready_seconds, read_seconds),
        "8b-memory": (memory / (1 << 20), needed / (1 << 20)),
    }


def _set_out(file: Path) -> None:
    _forget(file)
    np.ones(2 * file.stat().st_size + KV_BYTES, np.uint8)  # the most that either takes, with the system's copy of it


def _forget(file: Path) -> None:
    """Drop what the system keeps of a file in memory."""
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _read(file: Path) -> None:
    buffer = bytearray(1 << 24)
    with file.open("rb", buffering=0) as opened:
        while opened.readinto(buffer):
            pass


LARGE = Group(
    (
        Row("8b-pp64", "8B Q4_0: prompt 64", "tokens/s", "at least", 2, digits=1),
        Row("8b-tg32", "8B Q4_0: decode, 1 stream", "tokens/s", "at least", 1.25, digits=2),
        Row("8b-tg8", "8B Q4_0: decode, 8 streams", "tokens/s", "at least", 2.2, digits=1),
        Row(
            "8b-bandwidth",
            "8B Q4_0: weights read in decode, 1 stream",
            "GB/s",
            "at least",
            0.75,
            theirs="a plain read of 1 GiB",
            digits=1,
        ),
        Row("8b-memory", "8B Q4_0: peak memory", "MiB", "at most", 1.15, theirs="file + KV of 4,096 tokens"),
        Row("8b-ready", "8B Q4_0: start to ready", "s", "at most", 2, theirs="reading the file once", digits=1),
    ),
    measure,
    "trio-tlserve bench -p 64 -n 32 -npl 8 -npp 64 -ntg 32; llama-bench and llama-batched-bench with the same",
)
