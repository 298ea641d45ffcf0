"""What ``make fuzz`` runs exists, and says at its top what must hold."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz import ROOT, TARGETS, invariant, passes

FILES = [file for files in TARGETS.values() for file in files]


@pytest.mark.parametrize("file", FILES)
def test_each_file_states_its_invariant_and_has_examples_to_look_for(file: str) -> None:
    assert invariant(file).endswith(".")
    text = (ROOT / file).read_text()
    assert any(sign in text for sign in ("@given(", "RuleBasedStateMachine", ".parametrize()"))


def test_a_failure_says_how_to_see_it_again(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "test_broken.py"
    file.write_text("""
from hypothesis import given, strategies as st

@given(st.integers())
def test_broken(number: int) -> None:
    assert number < 1000
""")
    assert not passes((str(file),), seed=5)
    printed = capfd.readouterr().out
    assert "assert 1000 < 1000" in printed
    last = printed.splitlines()[-1]
    assert last.startswith("  again: HYPOTHESIS_PROFILE=fuzz .venv/bin/python -m pytest ")
    assert "--hypothesis-seed=5" in last
    assert last.endswith(str(file))
