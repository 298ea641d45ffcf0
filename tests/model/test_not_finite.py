"""Weights that are no numbers: refused where they would be quantised, and never an answer of null."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.client import post
from tests.model.containers import write_safetensors
from tests.model.test_runner import config
from tlserve import ServeConfig, serve
from tlserve.errors import ModelError
from tlserve.model.checkpoint import open_checkpoint
from tlserve.model.quants import dequantise
from tlserve.model.runner import load_runner

TINY = Path(__file__).parents[2] / "fixtures" / "tiny-llama"
MATRIX = "model.layers.0.mlp.up_proj.weight"


def spoilt(directory: Path, value: float) -> Path:
    """The tiny llama with this value at one place of a matrix that every token goes through."""
    shutil.copytree(TINY, directory)
    tensors = {name: dequantise(tensor).copy() for name, tensor in open_checkpoint(TINY).tensors.items()}
    tensors[MATRIX][3, 5] = value
    write_safetensors(directory / "model.safetensors", tensors)
    return directory


@pytest.mark.parametrize("weights", ["q8", "q4"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_numbers_that_are_not_finite_are_not_quantised(tmp_path: Path, value: float, weights: str) -> None:
    checkpoint = open_checkpoint(spoilt(tmp_path / "llama", value))
    with pytest.raises(ModelError, match=f"^{MATRIX}: has numbers that are not finite, which cannot be quantised$"):
        load_runner(checkpoint, config(weights=weights))


async def test_a_vector_that_is_not_finite_is_a_fault_and_no_null(tmp_path: Path) -> None:
    async with serve(ServeConfig.for_model(spoilt(tmp_path / "llama", np.nan), model_id="tiny")) as server:
        for encoding_format in ("float", "base64"):
            body = {"model": "tiny", "input": "a", "encoding_format": encoding_format}
            reply = await post(server.http_addr, "/v1/embeddings", body)
            assert reply.status == 500
            assert reply.json()["error"] == {
                "message": "the model's hidden states are not finite",
                "type": "server_error",
                "param": None,
                "code": "internal_error",
            }
