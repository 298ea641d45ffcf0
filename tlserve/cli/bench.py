"""``trio-tlserve bench``: how fast the engine is, without a server, in the terms of llama-bench."""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from contextlib import closing
from typing import Any

from tlserve.cli import plot
from tlserve.cli.arguments import add_engine_options, engine_config, integer, natural, new_parser, positive
from tlserve.cli.bench_tests import Batched, Bench, Single
from tlserve.cli.progress import Progress
from tlserve.loading import load

BLOCK_SIZE = 16

DESCRIPTION = """Measure tokens/s of a model: reading a prompt (pp), generating (tg), and both for many streams at
once. Tests are named and defined as in llama-bench and llama-batched-bench."""
EXAMPLES = (
    "trio-tlserve bench --model-dir model.gguf",
    "trio-tlserve bench --model-dir model.gguf -p 512,4096 -n 128 --streams 1,8,16 --json > bench.json",
)


def main(argv: Sequence[str]) -> int:
    arguments = parser().parse_args(argv)
    plot.check_option(parser(), arguments)
    singles = _singles(arguments)
    batches = [Batched(n, arguments.batched_prompt, arguments.batched_gen) for n in arguments.streams if n]
    figures = _measure(arguments, singles, batches)
    print(json.dumps(figures, indent=2) if arguments.json else _tables(figures))
    if arguments.plot is not None:
        plot.plot_bench(arguments.plot, figures["tests"], figures["batched"])
    return 0


def parser() -> argparse.ArgumentParser:
    made = new_parser("bench", DESCRIPTION, examples=EXAMPLES)
    add_engine_options(made)
    add = made.add_argument
    add("-p", "--n-prompt", type=_counts, default=[512], metavar="N,..", help="prompt lengths; default 512, 0 = none")
    add("-n", "--n-gen", type=_counts, default=[128], metavar="N,..", help="generated lengths; default 128, 0 = none")
    add("-d", "--n-depth", type=_counts, default=[0], metavar="N,..", help="tokens before those; default 0")
    add("-r", "--repetitions", type=positive, default=5, metavar="N", help="of each test; default 5")
    add(
        "-npl",
        "--streams",
        type=_counts,
        default=[1, 2, 4, 8, 16, 32],
        metavar="N,..",
        help="how many at once; default 1,2,4,8,16,32, 0 = none",
    )
    add(
        "-npp",
        "--batched-prompt",
        type=positive,
        default=128,
        metavar="N",
        help="tokens that a batched stream reads; default 128",
    )
    add("-ntg", "--batched-gen", type=positive, default=64, metavar="N", help="tokens that it generates; default 64")
    add("--seed", type=integer, default=0, metavar="N", help="of the random tokens; default 0")
    plot.add_option(made)
    return made


def _counts(text: str) -> list[int]:
    """Counts with commas between them."""
    return [natural(item) for item in text.split(",")]


def _singles(arguments: argparse.Namespace) -> list[Single]:
    kinds = [(count, 0) for count in arguments.n_prompt if count] + [(0, count) for count in arguments.n_gen if count]
    return [
        Single(num_prompt, num_generated, depth) for depth in arguments.n_depth for num_prompt, num_generated in kinds
    ]


def _measure(arguments: argparse.Namespace, singles: list[Single], batches: list[Batched]) -> dict[str, Any]:
    config = engine_config(
        arguments,
        prefix_cache="radix",
        block_size=BLOCK_SIZE,
        num_blocks=_num_blocks(singles, batches),
        max_num_seqs=_most_streams(batches),
        queue_capacity=_most_streams(batches),
    )
    with Progress() as progress, closing(load(config, progress)) as loaded:
        bench = Bench(loaded.engine, loaded.runners[0].vocab_size, seed=arguments.seed)
        num_runs = arguments.repetitions + 1  # the first one of each is not counted
        progress("runs", 0, num_runs * (len(singles) + len(batches)))
        return {
            "model": config.model_id,
            "fingerprint": loaded.fingerprint,
            "threads": config.engine.num_threads,
            "tests": [_single_figures(bench, test, num_runs, progress) for test in singles],
            "batched": [_batched_figures(bench, test, num_runs, progress) for test in batches],
        }


def _most_streams(batches: list[Batched]) -> int:
    return max((test.num_streams for test in batches), default=1)


def _num_blocks(singles: list[Single], batches: list[Batched]) -> int:
    """Room for the largest test twice: what the previous one left in the prefix cache need not be evicted first."""
    positions = [test.num_positions for test in singles] + [test.num_positions for test in batches]
    return 2 * (max(positions, default=1) // BLOCK_SIZE + 2 * _most_streams(batches))


def _single_figures(bench: Bench, test: Single, num_runs: int, progress: Progress) -> dict[str, Any]:
    rates: list[float] = []
    for _ in range(num_runs):
        rates.append(test.num_tokens / bench.single(test))
        progress.advance(f"{test.name} {rates[-1]:.1f} t/s")
    samples = rates[1:]
    return {
        "test": test.name,
        "n_prompt": test.num_prompt,
        "n_gen": test.num_generated,
        "n_depth": test.depth,
        "avg_ts": statistics.fmean(samples),
        "stddev_ts": statistics.stdev(samples) if len(samples) > 1 else 0.0,
        "samples_ts": samples,
    }


def _batched_figures(bench: Bench, test: Batched, num_runs: int, progress: Progress) -> dict[str, Any]:
    times: list[tuple[float, float]] = []
    for _ in range(num_runs):
        times.append(bench.batched(test))
        progress.advance(f"{test.num_streams} streams")
    prompt_seconds, seconds = (statistics.median(column) for column in zip(*times[1:], strict=True))
    num_prompt = test.num_streams * test.num_prompt
    num_generated = test.num_streams * test.num_generated
    return {
        "pp": test.num_prompt,
        "tg": test.num_generated,
        "pl": test.num_streams,
        "t_pp": prompt_seconds,
        "speed_pp": num_prompt / prompt_seconds,
        "t_tg": seconds,
        "speed_tg": num_generated / seconds,
        "t": prompt_seconds + seconds,
        "speed": (num_prompt + num_generated) / (prompt_seconds + seconds),
    }


def _tables(figures: dict[str, Any]) -> str:
    lines = [f"{figures['model']}, {figures['threads']} threads", ""]
    if figures["tests"]:
        lines += [f"| {'test':<16} | {'t/s':>20} |", f"| {'-' * 16} | {'-' * 19}: |"]
        for test in figures["tests"]:
            rate = f"{test['avg_ts']:.2f} ± {test['stddev_ts']:.2f}"
            lines.append(f"| {test['test']:<16} | {rate:>20} |")
    if figures["batched"]:
        heads = ("PP", "TG", "B", "T_PP s", "S_PP t/s", "T_TG s", "S_TG t/s", "T s", "S t/s")
        keys = ("pp", "tg", "pl", "t_pp", "speed_pp", "t_tg", "speed_tg", "t", "speed")
        lines += [
            "",
            "| " + " | ".join(f"{head:>8}" for head in heads) + " |",
            "| " + " | ".join(["-------:"] * len(heads)) + " |",
        ]
        for batch in figures["batched"]:
            cells = [_cell(key, batch[key]) for key in keys]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines).rstrip()


def _cell(key: str, value: float) -> str:
    if key.startswith("speed"):
        return f"{value:8.2f}"
    return f"{value:8.3f}" if key.startswith("t_") or key == "t" else f"{value:8}"
