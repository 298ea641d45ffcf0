"""Sixteen deliberate faults, one at a time, each caught by the test that is named for it: ``make mutants``.

A mutant is one replacement in one file of a copy of the tree. It is caught when its test passes on the copy
as it stands and fails, by an assertion or an error of the test itself, once the fault is in.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
COPIED = ("tlserve", "tests", "fixtures", "docs", "pyproject.toml", "runtime.toml", "README.md")
TESTS_FAILED = 1  # pytest's exit status when tests ran and some failed


@dataclass(frozen=True)
class Mutant:
    name: str
    fault: str
    file: str
    old: str  # occurs exactly once
    new: str
    test: str  # in tests/test_contract.py


MUTANTS: tuple[Mutant, ...] = ()


def run_test(tree: Path, test: str) -> int:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", f"tests/test_contract.py::{test}"]
    done = subprocess.run(command, cwd=tree, capture_output=True, check=False, timeout=300)
    return done.returncode


def is_caught(tree: Path, mutant: Mutant) -> bool:
    path = tree / mutant.file
    source = path.read_text()
    assert source.count(mutant.old) == 1, f"{mutant.name}: the text to replace occurs {source.count(mutant.old)} times"
    path.write_text(source.replace(mutant.old, mutant.new))
    try:
        return run_test(tree, mutant.test) == TESTS_FAILED
    finally:
        path.write_text(source)


def copy_tree(target: Path) -> None:
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, target / name, ignore=shutil.ignore_patterns("__pycache__"))
        elif source.exists():
            shutil.copy(source, target / name)


def main() -> int:
    passed = failed = 0
    with tempfile.TemporaryDirectory() as scratch:
        tree = Path(scratch)
        copy_tree(tree)
        for test in sorted({mutant.test for mutant in MUTANTS}):
            if run_test(tree, test) != 0:
                print(f"{test} fails without any fault")
                return 1
        for mutant in MUTANTS:
            caught = is_caught(tree, mutant)
            passed, failed = passed + caught, failed + (not caught)
            print(f"{mutant.name} {'caught' if caught else 'MISSED'} by {mutant.test}: {mutant.fault}", flush=True)
    print(f"{passed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
