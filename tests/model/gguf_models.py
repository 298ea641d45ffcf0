"""GGUF files of small models, written by the `gguf` package, as its converter would write them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from tests.model.scripted import BYTE_CHARACTERS
from tlserve.model.config import ModelConfig
from tlserve.model.layout import HEAD, expected_tensors, gguf_name, interleaved_order, rotated_heads
from tlserve.model.rope import LinearScaling, Llama3Scaling, YarnScaling, inverse_frequencies
from tlserve.model.tensors import Format

Floats = NDArray[np.float32]

K_FORMATS = (Format.Q4_K, Format.Q5_K, Format.Q6_K)  # the package has no quantiser for these
_SCALE_BYTES = {  # where the float16 scales of each block are
    Format.Q4_0: (0,), Format.Q4_1: (0, 2), Format.Q5_0: (0,), Format.Q5_1: (0, 2), Format.Q8_0: (0,),
    Format.Q4_K: (0, 2), Format.Q5_K: (0, 2), Format.Q6_K: (208,),
}  # fmt: skip


def wide_config(architecture: str = "llama", **changes: Any) -> ModelConfig:
    """A model just wide enough that its rows are whole K-quant blocks."""
    values: dict[str, Any] = {
        "architecture": architecture,
        "vocab_size": 257,
        "hidden_size": 256,
        "intermediate_size": 256,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "attention_bias": architecture == "qwen2",
        "output_bias": False,
        "mlp_bias": False,
        "qk_norm": architecture == "qwen3",
        "eos_token_ids": frozenset({256}),
        "bos_token_id": None,
    }
    return ModelConfig(**(values | changes))


def random_weights(config: ModelConfig, seed: int) -> dict[str, Floats]:
    """Weights under their canonical names, scaled so that attention matters."""
    rng = np.random.default_rng(seed)
    shapes = dict(expected_tensors(config))
    if not config.tie_word_embeddings:
        shapes[HEAD] = (config.vocab_size, config.hidden_size)
    return {name: _random(rng, name, shape) for name, shape in shapes.items()}


def _random(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> Floats:
    noise = rng.standard_normal(shape, dtype=np.float32)
    if "norm" in name:
        return 1 + np.float32(0.2) * noise
    return noise * np.float32(0.3 if len(shape) == 1 else 0.5 if "embed" in name else 1.5 / shape[1] ** 0.5)


def random_blocks(rng: np.random.Generator, format: Format, num_rows: int, columns: int) -> NDArray[np.uint8]:
    """Rows of a quantised format, [num_rows, row_bytes]: any quants, small finite scales of either sign."""
    blocks = rng.integers(0, 256, (num_rows * columns // format.block_size, format.block_bytes), dtype=np.uint8)
    for start in _SCALE_BYTES[format]:
        scales = rng.uniform(-1e-3, 1e-3, (len(blocks), 1)).astype(np.float16)
        blocks[:, start : start + 2] = scales.view(np.uint8)
    return blocks.reshape(num_rows, -1)


def write_gguf_model(
    path: Path,
    config: ModelConfig,
    weights: Mapping[str, Floats],
    format: Format = Format.F32,
    *,
    seed: int = 0,
    alter: Callable[[gguf.GGUFWriter], object] = lambda writer: None,
) -> dict[str, Floats]:
    """Write the model with its matrices in `format`; gives the weights the file then holds, by canonical name.

    K-quants get random blocks in place of the given matrices. `alter` may add to the file or spoil its fields.
    """
    rng = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, config.architecture)
    _add_config(writer, config)
    _add_tokenizer(writer, config)
    held: dict[str, Floats] = {}
    for name, weight in weights.items():
        heads = rotated_heads(name, config) if config.architecture == "llama" else 0
        order = interleaved_order(heads, config.head_dim) if heads else np.arange(len(weight))
        stored = np.empty_like(weight)
        stored[order] = weight
        number = gguf.GGMLQuantizationType((format if weight.ndim == 2 else Format.F32).value)
        if weight.ndim == 2 and format in K_FORMATS:
            data = random_blocks(rng, format, *weight.shape)
        else:
            data = gguf.quants.quantize(stored, number)
        writer.add_tensor(gguf_name(name), data, raw_dtype=number)
        held[name] = gguf.quants.dequantize(data, number)[order]
    alter(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return held


def _add_config(writer: gguf.GGUFWriter, config: ModelConfig) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_theta)
    if config.head_dim * config.num_heads != config.hidden_size:
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    match config.rope_scaling:
        case LinearScaling(factor):
            writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
            writer.add_rope_scaling_factor(factor)
        case YarnScaling() as yarn:
            writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
            writer.add_rope_scaling_factor(yarn.factor)
            writer.add_rope_scaling_orig_ctx_len(yarn.original_max_position_embeddings)
        case Llama3Scaling() as llama3:
            plain, _ = inverse_frequencies(config.head_dim, config.rope_theta, None)
            scaled, _ = inverse_frequencies(config.head_dim, config.rope_theta, llama3)
            writer.add_tensor("rope_freqs.weight", plain / scaled)


def _add_tokenizer(writer: gguf.GGUFWriter, config: ModelConfig) -> None:
    """Bytes and an end of text, as byte-level BPE without merges."""
    control = config.vocab_size - len(BYTE_CHARACTERS)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([BYTE_CHARACTERS[byte] for byte in range(256)] + [f"<{i}>" for i in range(control)])
    writer.add_token_types([gguf.TokenType.NORMAL] * 256 + [gguf.TokenType.CONTROL] * control)
    for token in config.eos_token_ids:
        writer.add_eos_token_id(token)
