"""``trio-tlserve compile``: what it compiles is all that a model can need, and it says when that is not kept."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest

from tests.command import ROOT
from tlserve.cli import compile as command
from tlserve.config import EngineConfig
from tlserve.errors import ConfigError
from tlserve.kernels import jit
from tlserve.model import weights
from tlserve.model.checkpoint import open_checkpoint
from tlserve.model.runner import load_runner


def test_every_kernel_is_compiled_and_kept(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([]) == 0
    directory = Path(capsys.readouterr().out.strip().rpartition(" are in ")[2])
    assert directory == jit.cache_root() / jit.cache_key()
    kept = {path.name.rpartition("-")[0] for path in directory.iterdir()}
    assert kept >= {leaf.name for leaf in command.every_leaf()}
    assert kept >= {entry.name for entry in jit._ENTRIES}


@pytest.mark.parametrize("kv_dtype", ["f16", "f32"])
def test_a_model_needs_no_kernel_beside_those(kv_dtype: Literal["f16", "f32"], monkeypatch: pytest.MonkeyPatch) -> None:
    needed = set[str]()

    def compile_all(leaves: list[jit.Compiled], progress: object) -> None:
        needed.update(leaf.name for leaf in leaves)
        jit.compile_all(leaves)

    monkeypatch.setattr(weights, "compile_all", compile_all)
    config = EngineConfig(kv_dtype=kv_dtype, num_blocks=8, max_model_len=64, threads=1)
    load_runner(open_checkpoint(ROOT / "fixtures" / "tiny-llama"), config).close()
    assert needed
    assert needed <= {leaf.name for leaf in command.every_leaf()}


def test_a_cache_that_cannot_be_written_is_a_failure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TLSERVE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(command, "compile_all", lambda leaves, progress: progress(len(leaves), len(leaves), ""))
    with pytest.raises(ConfigError, match=r"holds 0 of \d+ kernels, it could not be written"):
        command.main([])
