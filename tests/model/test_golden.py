"""The plain reference forward pass agrees with transformers on every family and variant (K26)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.reference import ReferenceModel
from tlserve.model.checkpoint import Checkpoint, open_checkpoint

FIXTURES = Path(__file__).parents[2] / "fixtures"
GOLDEN = json.loads((FIXTURES / "golden" / "cases.json").read_text())


def golden_checkpoint(case: str, directory: Path) -> Checkpoint:
    """The model of a golden case: a fixture with some keys of its config replaced."""
    source = FIXTURES / GOLDEN["cases"][case]["model"]
    config = json.loads((source / "config.json").read_text()) | GOLDEN["cases"][case]["config"]
    (directory / "config.json").write_text(json.dumps(config))
    shutil.copy(source / "model.safetensors", directory)
    return open_checkpoint(directory)


@pytest.mark.parametrize("case", GOLDEN["cases"])
def test_logits_equal_the_reference_implementation(case: str, tmp_path: Path) -> None:
    """B122, B123: to 1e-4 of the largest logit, also past the original context of a stretched model."""
    model = ReferenceModel(golden_checkpoint(case, tmp_path))
    with np.load(FIXTURES / "golden" / "logits.npz") as golden:
        expected = golden[case]
    logits = model.logits(GOLDEN["tokens"])[GOLDEN["positions"]]
    assert np.abs(logits - expected).max() <= 1e-4 * np.abs(expected).max()


def test_the_variants_of_a_model_give_different_logits() -> None:
    """A factor that were read and not used would go unnoticed otherwise."""
    with np.load(FIXTURES / "golden" / "logits.npz") as golden:
        scaled = [golden[case] for case in GOLDEN["cases"] if case.startswith("rope-") and case not in SAME_AS_LLAMA]
        plain = golden["llama"]
        assert all(np.array_equal(golden[case], plain) for case in SAME_AS_LLAMA)
    last = [logits[-1] for logits in [plain, *scaled]]
    assert all(not np.allclose(a, b, rtol=1e-2) for i, a in enumerate(last) for b in last[:i])


SAME_AS_LLAMA = ("rope-default", "rope-null")
