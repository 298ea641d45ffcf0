"""The rows of the table and how each is measured: one round of a group gives one sample of each of its rows."""

from __future__ import annotations

import multiprocessing
import pydoc_data.topics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from tests.bench.commands import Llama, ours
from tests.bench.machine import read_bandwidth
from tests.bench.results import Row, Sample
from tlserve.model.checkpoint import open_checkpoint

Samples = dict[str, Sample]
PERPLEXITY_CHUNKS = 16


@dataclass(frozen=True)
class Context:
    peer_bin: str | None
    model: Path  # SmolLM2 as Q4_1
    cache_dir: Path
    threads: int

    @cached_property
    def llama(self) -> Llama:
        return Llama.find(self.peer_bin)

    def file(self, kind: str) -> Path:
        """SmolLM2 in another format, both sides reading the same file."""
        if kind == "Q4_1":
            return self.model
        return self.llama.quantise(self.model, kind, self.cache_dir / f"smol-135m.{kind}.gguf")


@dataclass(frozen=True)
class Group:
    rows: tuple[Row, ...]
    measure: Callable[[Context], Samples]
    how: str  # the commands that give the figures
    needs_peer: bool = True


def engine_group(kind: str, floors: tuple[float, float, float]) -> Group:
    """Prompt, one stream and 16 streams without HTTP."""
    titles = ("prompt 512", "decode, 1 stream", "decode, 16 streams")
    ids = [f"{kind}-{part}" for part in ("pp512", "tg128", "tg16")]
    rows = tuple(
        Row(id, f"{kind}: {title}", "tokens/s", "at least", floor)
        for id, title, floor in zip(ids, titles, floors, strict=True)
    )

    def measure(context: Context) -> Samples:
        return dict(zip(ids, _engine_samples(context, context.file(kind)), strict=True))

    how = "trio-tlserve bench -r 3 -npl 16; llama-bench -r 3; llama-batched-bench -npp 128 -ntg 64 -npl 16"
    return Group(rows, measure, how)


def _engine_samples(context: Context, file: Path) -> list[Sample]:
    threads = str(context.threads)
    mine = ours("bench", "--model-dir", file, "--threads", threads, "-r", "3", "-npl", "16")
    singles = context.llama.bench(file, context.threads, "-r", "3")
    batched = context.llama.batched(file, context.threads, streams=16, num_prompt=128, num_generated=64)
    return [
        (mine["tests"][0]["avg_ts"], singles[0]["avg_ts"]),
        (mine["tests"][1]["avg_ts"], singles[1]["avg_ts"]),
        (mine["batched"][0]["speed_tg"], batched["speed_tg"]),
    ]


def measure_long(context: Context) -> Samples:
    threads = str(context.threads)
    common = ("bench", "--model-dir", context.model, "--threads", threads, "-r", "1", "-npl", "0")
    prompt = ours(*common, "-p", "4096", "-n", "0")
    deep = ours(*common, "-p", "0", "-n", "32", "-d", "4096")
    their_prompt = context.llama.bench(context.model, context.threads, "-p", "4096", "-n", "0", "-r", "1")
    their_deep = context.llama.bench(context.model, context.threads, "-p", "0", "-n", "32", "-d", "4096", "-r", "1")
    return {
        "long-pp4096": (prompt["tests"][0]["avg_ts"], their_prompt[0]["avg_ts"]),
        "long-tg-d4096": (deep["tests"][0]["avg_ts"], their_deep[0]["avg_ts"]),
    }


LONG = Group(
    (
        Row("long-pp4096", "Q4_1: prompt 4,096", "tokens/s", "at least", 3),
        Row("long-tg-d4096", "Q4_1: decode at a depth of 4,096", "tokens/s", "at least", 3),
    ),
    measure_long,
    "trio-tlserve bench -p 4096 -n 0; trio-tlserve bench -p 0 -n 32 -d 4096; llama-bench with the same",
)


def measure_neighbour(context: Context) -> Samples:
    """The case that a barrier which only spins loses: somebody else wants one of the cores."""
    neighbour = multiprocessing.get_context("spawn").Process(target=_spin, daemon=True)
    neighbour.start()
    try:
        threads = str(context.threads)
        mine = ours("bench", "--model-dir", context.model, "--threads", threads, "-r", "3", "-npl", "0", "-p", "0")
        theirs = context.llama.bench(context.model, context.threads, "-r", "3", "-p", "0")
    finally:
        neighbour.kill()
        neighbour.join()
    return {"neighbour-tg128": (mine["tests"][0]["avg_ts"], theirs[0]["avg_ts"])}


def _spin() -> None:
    while True:
        pass


NEIGHBOUR = Group(
    (Row("neighbour-tg128", "Q4_1: decode, 1 stream, another program on one core", "tokens/s"),),
    measure_neighbour,
    "trio-tlserve bench -p 0 -npl 0 and llama-bench -p 0, each beside an endless loop",
)


def measure_bandwidth(context: Context) -> Samples:
    read = read_bandwidth(context.threads)
    threads = str(context.threads)
    mine = ours("bench", "--model-dir", context.model, "--threads", threads, "-r", "3", "-npl", "0", "-p", "0")
    return {"bandwidth": (mine["tests"][0]["avg_ts"] * bytes_per_token(context.model) / 1e9, read / 1e9)}


def bytes_per_token(file: Path) -> int:
    """Weights that every token reads, in the file's own format; the KV cache comes on top and is not counted."""
    checkpoint = open_checkpoint(file)
    sizes = {name: tensor.data.nbytes for name, tensor in checkpoint.tensors.items()}
    if "lm_head.weight" in sizes:
        del sizes["model.embed_tokens.weight"]  # one row of it is read
    return sum(sizes.values())


BANDWIDTH = Group(
    (
        Row(
            "bandwidth",
            "Q4_1: weights read in decode, 1 stream",
            "GB/s",
            "at least",
            0.75,
            theirs="a plain read of 1 GiB",
            digits=1,
        ),
    ),
    measure_bandwidth,
    "trio-tlserve bench -p 0 -npl 0, times the bytes of the weights; tests/bench/machine.py",
    needs_peer=False,
)


def measure_perplexity(context: Context) -> Samples:
    with tempfile.NamedTemporaryFile("w", suffix=".txt", encoding="utf-8") as file:
        file.write("\n".join(text for _, text in sorted(pydoc_data.topics.topics.items())))
        file.flush()
        text = Path(file.name)
        scope = ("--threads", str(context.threads), "--chunks", str(PERPLEXITY_CHUNKS))
        mine = ours("perplexity", "--model-dir", context.model, *scope, text)
        theirs = context.llama.perplexity(context.model, context.threads, text, PERPLEXITY_CHUNKS)
    return {"perplexity": (mine["ppl"], theirs)}


PERPLEXITY = Group(
    (Row("perplexity", "Q4_1: perplexity of Python's own help topics", "", "within", 0.005, digits=3),),
    measure_perplexity,
    f"trio-tlserve perplexity --chunks {PERPLEXITY_CHUNKS}; llama-perplexity --chunks {PERPLEXITY_CHUNKS} -c 512",
)
