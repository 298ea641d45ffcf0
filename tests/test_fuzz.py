"""What ``make fuzz`` runs exists, and says at its top what must hold."""

from __future__ import annotations

import pytest

from tests.fuzz import ROOT, TARGETS, invariant

FILES = [file for files in TARGETS.values() for file in files]


@pytest.mark.parametrize("file", FILES)
def test_each_file_states_its_invariant_and_has_examples_to_look_for(file: str) -> None:
    assert invariant(file).endswith(".")
    text = (ROOT / file).read_text()
    assert any(sign in text for sign in ("@given(", "RuleBasedStateMachine", ".parametrize()"))
