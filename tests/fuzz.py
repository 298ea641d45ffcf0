"""``make fuzz``: the Hypothesis tests of each border that strangers' bytes cross, with new examples until time is over.

The tests are those of the suite; here they run under the profile "fuzz" of tests/conftest.py, each round with a seed of
its own. The invariant of each stands at the top of its file. A failure is kept in .hypothesis/ and found again by the
next run of the suite; its seed is printed.
"""

from __future__ import annotations

import argparse
import ast
import os
import secrets
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
TARGETS: dict[str, tuple[str, ...]] = {
    "HTTP": ("tests/http/test_fuzz.py", "tests/http/test_framing.py"),
    "JSON bodies": ("tests/openai/test_fuzz.py", "tests/openai/test_body.py"),
    "OpenAPI": ("tests/openapi/test_schemathesis.py",),
    "GGUF": ("tests/model/test_gguf.py", "tests/model/test_checkpoint.py"),
    "safetensors": ("tests/model/test_safetensors.py", "tests/model/test_config.py"),
    "templates and tokenizers": (
        "tests/text/test_template.py",
        "tests/text/test_loading.py",
        "tests/text/test_chat.py",
    ),
    "TextStream": ("tests/text/test_text_stream.py", "tests/text/test_alternatives.py"),
    "engine": ("tests/engine/test_state_machine.py",),
}


@dataclass
class Result:
    name: str
    num_rounds: int
    seconds: float
    failed_seed: int | None


def invariant(file: str) -> str:
    """The paragraph of a test file's docstring that says what must hold of any input."""
    paragraphs = (ast.get_docstring(ast.parse((ROOT / file).read_text())) or "").split("\n\n")
    stated = [" ".join(paragraph.split()) for paragraph in paragraphs if paragraph.startswith("Invariant: ")]
    if len(stated) != 1:
        raise LookupError(f"{file} must state one invariant at its top")
    return stated[0].removeprefix("Invariant: ")


def fuzz(name: str, seconds: float) -> Result:
    """Rounds of one target until the time is over; at least one, and none after a failure."""
    began = time.monotonic()
    num_rounds = 0
    while num_rounds == 0 or time.monotonic() - began < seconds:
        seed = secrets.randbelow(2**32)
        num_rounds += 1
        if not passes(TARGETS[name], seed):
            return Result(name, num_rounds, time.monotonic() - began, seed)
    return Result(name, num_rounds, time.monotonic() - began, None)


def command(files: tuple[str, ...], seed: int) -> list[str]:
    """Run one round, below ``python``."""
    options = ["-q", "-m", "hypothesis", "-p", "no:cacheprovider", f"--hypothesis-seed={seed}"]
    # A round takes longer than any other test may.
    return ["-m", "pytest", *options, "-o", "faulthandler_timeout=0", *files]


def passes(files: tuple[str, ...], seed: int) -> bool:
    done = subprocess.run(
        [sys.executable, *command(files, seed)],
        cwd=ROOT,
        env={**os.environ, "HYPOTHESIS_PROFILE": "fuzz"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        print(done.stdout[-10_000:] + done.stderr[-2_000:])
        print(f"  again: HYPOTHESIS_PROFILE=fuzz .venv/bin/python {shlex.join(command(files, seed))}")
    return done.returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=12.0, help="for all targets together; equal shares")
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"of {', '.join(TARGETS)}; all without any")
    arguments = parser.parse_args()
    names = arguments.targets or list(TARGETS)
    if unknown := set(names) - TARGETS.keys():
        parser.error(f"no such target: {', '.join(sorted(unknown))}")
    results = []
    for name in names:
        print(f"{name}\n  " + "\n  ".join(map(invariant, TARGETS[name])), flush=True)
        result = fuzz(name, arguments.minutes * 60 / len(names))
        outcome = "passed" if result.failed_seed is None else f"FAILED with seed {result.failed_seed}"
        print(f"  {outcome}: {result.num_rounds} rounds in {result.seconds:.0f} s\n", flush=True)
        results.append(result)
    print(f"{sum(result.seconds for result in results) / 60:.1f} minutes in all")
    return 1 if any(result.failed_seed is not None for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
