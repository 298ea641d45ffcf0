"""``trio-tlserve compile``: what it compiles is all that a model can need, and it says when that is not kept."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.command import ROOT
from tlserve.cli import compile as command
from tlserve.errors import ConfigError
from tlserve.kernels import jit

START = """
import json, sys
from tlserve.config import ServeConfig
from tlserve.kernels.jit import CacheDirectory
from tlserve.loading import load, silent
asked = []
find = CacheDirectory.load
def recorded(self, key):
    asked.append(key.rpartition("-")[0])
    return find(self, key)
CacheDirectory.load = recorded
load(ServeConfig.for_model(sys.argv[1], num_blocks=16, **json.loads(sys.argv[2])), silent).close()
print(json.dumps(asked))
"""


def test_every_kernel_is_compiled_and_kept(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([]) == 0
    directory = Path(capsys.readouterr().out.strip().rpartition(" are in ")[2])
    assert directory == jit.cache_root() / jit.cache_key()
    kept = {path.name.rpartition("-")[0] for path in directory.iterdir()}
    assert kept >= {leaf.name for leaf in command.every_leaf()}
    assert kept >= {entry.name for entry in jit._ENTRIES}


@pytest.mark.parametrize("keys", [{}, {"kv_dtype": "f32"}, {"weights": "q4"}, {"weights": "q8"}], ids=str)
def test_a_model_needs_no_kernel_beside_those(keys: dict[str, str]) -> None:
    """Everything that a start asks the cache for, in a process that has compiled nothing yet."""
    command_line = [sys.executable, "-c", START, str(ROOT / "fixtures" / "tiny-llama"), json.dumps(keys)]
    started = subprocess.run(command_line, cwd=ROOT, capture_output=True, text=True, check=True)
    asked = set(json.loads(started.stdout))
    known = {leaf.name for leaf in command.every_leaf()} | {entry.name for entry in jit._ENTRIES}
    assert {name.partition("-")[0] for name in asked} >= {"tiles", "pack", "attend"}
    assert asked <= known


def test_a_cache_that_cannot_be_written_is_a_failure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TLSERVE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(command, "compile_all", lambda leaves, progress: progress(len(leaves), len(leaves), ""))
    with pytest.raises(ConfigError, match=r"holds 0 of \d+ kernels, it could not be written"):
        command.main([])
