"""The plain reference forward pass agrees with transformers on every family and variant (K26)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.model.gguf_models import write_gguf_model
from tests.reference import ReferenceModel
from tlserve.model.checkpoint import Checkpoint, open_checkpoint
from tlserve.model.config import inverse_frequencies
from tlserve.model.quants import dequantise

FIXTURES = Path(__file__).parents[2] / "fixtures"
SAME_AS_LLAMA = ("rope-default", "rope-null")
GOLDEN = json.loads((FIXTURES / "golden" / "cases.json").read_text())


def golden_checkpoint(case: str, directory: Path) -> Checkpoint:
    """The model of a golden case: a fixture with some keys of its config replaced."""
    source = FIXTURES / GOLDEN["cases"][case]["model"]
    config = json.loads((source / "config.json").read_text()) | GOLDEN["cases"][case]["config"]
    (directory / "config.json").write_text(json.dumps(config))
    shutil.copy(source / "model.safetensors", directory)
    return open_checkpoint(directory)


def golden_array(name: str) -> NDArray[np.floating]:
    with np.load(FIXTURES / "golden" / "golden.npz") as golden:
        array: NDArray[np.floating] = golden[name]
    return array


def assert_golden_logits(checkpoint: Checkpoint, case: str) -> None:
    """To 1e-4 of the largest logit; positions go past the original context of the stretched models."""
    logits = ReferenceModel(checkpoint).logits(GOLDEN["tokens"])[GOLDEN["positions"]]
    expected = golden_array(f"{case}.logits")
    assert np.abs(logits - expected).max() <= 1e-4 * np.abs(expected).max()


@pytest.mark.parametrize("case", GOLDEN["cases"])
def test_logits_equal_the_reference_implementation(case: str, tmp_path: Path) -> None:
    """B122, B123."""
    assert_golden_logits(golden_checkpoint(case, tmp_path), case)


@pytest.mark.parametrize("case", GOLDEN["cases"])
def test_rotary_frequencies_equal_the_reference_implementation(case: str, tmp_path: Path) -> None:
    """B122: to the last bit or the one before it, where two math libraries round a power differently."""
    frequencies, factor = inverse_frequencies(golden_checkpoint(case, tmp_path).config)
    assert frequencies.dtype == np.float32
    np.testing.assert_allclose(frequencies, golden_array(f"{case}.frequencies"), rtol=2e-7)
    assert factor == pytest.approx(float(golden_array(f"{case}.factor")), rel=1e-12)


def test_the_variants_of_a_model_give_different_logits() -> None:
    """A factor that were read and not used would go unnoticed otherwise."""
    plain = golden_array("llama.logits")
    assert all(np.array_equal(golden_array(f"{case}.logits"), plain) for case in SAME_AS_LLAMA)
    scaled = [case for case in GOLDEN["cases"] if case.startswith("rope-") and case not in SAME_AS_LLAMA]
    last = [golden_array(f"{case}.logits")[-1] for case in ["llama", *scaled]]
    assert all(not np.allclose(a, b, rtol=1e-2) for i, a in enumerate(last) for b in last[:i])


@pytest.mark.parametrize("case", ["llama", "llama-bias", "qwen2", "qwen3", "rope-linear", "rope-llama3", "rope-yarn"])
def test_a_gguf_file_of_the_model_gives_the_same_logits(case: str, tmp_path: Path) -> None:
    """Names, row order, rope keys and rope_freqs mean what they mean in the config."""
    source = golden_checkpoint(case, tmp_path)
    weights = {name: dequantise(tensor) for name, tensor in source.tensors.items()}
    write_gguf_model(tmp_path / "model.gguf", source.config, weights)
    assert_golden_logits(open_checkpoint(tmp_path / "model.gguf"), case)
