"""The choice of instruction set, and a cache that never costs more than time."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tlserve.errors import ConfigError
from tlserve.kernels import jit
from tlserve.kernels.jit import CacheDirectory, Target, choose_target

AVX512 = frozenset(jit.NEEDS["avx512"] | jit.NEEDS["avx2"])
AVX2 = frozenset(jit.NEEDS["avx2"])


@pytest.mark.parametrize(
    ("features", "isa"),
    [(AVX512, "avx512"), (AVX512 - {"avx512vnni"}, "avx2"), (AVX2, "avx2"), (frozenset(), "portable")],
)
def test_best_instruction_set_of_the_cpu_is_chosen(features: frozenset[str], isa: str) -> None:
    assert choose_target(None, "cpu", features) == Target(isa, "cpu", features)
    assert choose_target("", "cpu", features).isa == isa


def test_a_lower_instruction_set_is_compiled_for_a_cpu_that_has_no_more() -> None:
    assert choose_target("avx2", "znver4", AVX512) == Target("avx2", "haswell", AVX2)
    assert choose_target("portable", "znver4", AVX512) == Target("portable", "x86-64", frozenset())


def test_the_cpus_own_instruction_set_may_be_named() -> None:
    assert choose_target("avx512", "znver4", AVX512) == Target("avx512", "znver4", AVX512)


def test_an_instruction_set_that_the_cpu_lacks_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"TLSERVE_ISA=avx512: this CPU \(haswell\) lacks avx512bw, .*avx512vnni"):
        choose_target("avx512", "haswell", AVX2)


def test_an_unknown_instruction_set_is_refused() -> None:
    with pytest.raises(ConfigError, match="TLSERVE_ISA must be one of avx512, avx2, portable, got 'sse9'"):
        choose_target("sse9", "znver4", AVX512)


def test_cache_lies_where_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TLSERVE_CACHE_DIR", "/a")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    assert jit.cache_root() == Path("/a")
    monkeypatch.delenv("TLSERVE_CACHE_DIR")
    assert jit.cache_root() == Path("/b/tlserve")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert jit.cache_root() == Path.home() / ".cache" / "tlserve"


def test_cache_key_changes_with_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    here = jit.cache_key()
    monkeypatch.setattr(jit, "TARGET", Target(jit.TARGET.isa, "another", jit.TARGET.features))
    assert jit.cache_key() != here


def test_saved_bytes_come_back(tmp_path: Path) -> None:
    directory = CacheDirectory(tmp_path / "new")
    assert directory.load("k") is None
    directory.save("k", b"code")
    assert directory.load("k") == b"code"
    assert CacheDirectory(tmp_path / "new").load("k") == b"code"
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["k"]


@pytest.mark.parametrize("damage", [b"", b"x" * 40])
def test_a_damaged_file_is_as_good_as_none(tmp_path: Path, damage: bytes) -> None:
    directory = CacheDirectory(tmp_path)
    directory.save("k", b"code")
    (tmp_path / "k").write_bytes(damage)
    assert directory.load("k") is None
    directory.save("k", b"code")
    assert directory.load("k") == b"code"


def test_a_place_that_cannot_be_written_costs_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_bytes(b"")
    directory = CacheDirectory(tmp_path / "file" / "cache")  # no directory can be made below a file, by any user
    with caplog.at_level(logging.WARNING):
        for key in ("a", "b"):
            assert directory.load(key) is None
            directory.save(key, b"code")
    assert len(caplog.records) == 1
    assert "kernel cache cannot be" in caplog.text


def test_a_full_disk_leaves_no_part_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Path, data: bytes) -> int:
        with self.open("wb") as file:
            file.write(data[:1])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    directory = CacheDirectory(tmp_path)
    directory.save("k", b"code")
    assert list(tmp_path.iterdir()) == []
    assert directory.load("k") is None


def test_code_of_another_users_directory_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    CacheDirectory(tmp_path).save("k", b"code")
    monkeypatch.setattr(os, "getuid", lambda: tmp_path.stat().st_uid + 1)
    directory = CacheDirectory(tmp_path)
    assert directory.load("k") is None
    directory.save("l", b"code")
    assert [path.name for path in tmp_path.iterdir()] == ["k"]


TWICE = """
import numpy as np
from tlserve.kernels import jit, pack
from tlserve.kernels.layout import LAYOUTS
print(pack.quantise_rows(np.ones((1, 32), np.float32), LAYOUTS["Q8_0"]).tobytes().hex())
compiled = next(e for e in jit._ENTRIES if e.name == "pack._quantise_rows").dispatcher
print(sum(compiled.stats.cache_hits.values()))
"""


def test_what_one_process_compiled_the_next_one_loads(tmp_path: Path) -> None:
    environment = os.environ | {"TLSERVE_CACHE_DIR": str(tmp_path)}
    first, second = (
        subprocess.run(
            [sys.executable, "-c", TWICE], env=environment, capture_output=True, text=True, check=True
        ).stdout
        for _ in range(2)
    )
    assert first.split() == ["0820" + "7f" * 32, "0"]
    assert second.split() == ["0820" + "7f" * 32, "1"]
