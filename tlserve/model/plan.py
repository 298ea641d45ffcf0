"""What a model takes of the memory, known before any of it is taken."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tlserve.config import EngineConfig
from tlserve.errors import ConfigError
from tlserve.kernels.attention import scratch_floats
from tlserve.kernels.kv_cache import sub_block_bytes
from tlserve.kernels.product import activation_bytes
from tlserve.kernels.state import Dims
from tlserve.model.checkpoint import Checkpoint
from tlserve.model.config import ModelConfig
from tlserve.model.layout import BIGRAM_LOGITS
from tlserve.model.memory import available_memory, check_fits, num_kv_blocks
from tlserve.model.weights import packed_bytes

BOOK_BYTES = 64  # of the engine's books for a block, which are all that a block of a bigram takes
_KV_NUMBER_BYTES = {"f16": 2, "f32": 4}

BufferShapes = dict[str, tuple[tuple[int, ...], type[Any]]]


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Sizes in bytes, and the numbers they follow from."""

    vocab_size: int
    block_size: int
    max_model_len: int  # that a request may have by the configuration; the blocks may hold less
    num_blocks: int
    block_bytes: int
    weights_bytes: int  # packed, with the table of rotations
    buffers_bytes: int  # of the largest step
    available_bytes: int  # before any of it is taken

    @property
    def kv_bytes(self) -> int:
        return self.num_blocks * self.block_bytes

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + self.buffers_bytes + self.kv_bytes

    @property
    def num_tokens(self) -> int:
        """Tokens that all blocks hold together."""
        return self.num_blocks * self.block_size


def plan_memory(*models: tuple[Checkpoint, EngineConfig]) -> tuple[MemoryPlan, ...]:
    """Decide the context and the number of blocks: one plan each, for a model and a draft model on the same blocks.

    Raises ConfigError when the configured context is longer than the model's, or memory is too small.
    """
    available = available_memory()
    plans = [_without_blocks(checkpoint, config, available) for checkpoint, config in models]
    weights, fixed = sum(plan.weights_bytes for plan in plans), sum(plan.total_bytes for plan in plans)
    check_fits("the weights", weights, available)
    check_fits("the weights and the buffers of a step", fixed, available)
    num_blocks = num_kv_blocks(
        models[0][1],
        block_bytes=sum(plan.block_bytes for plan in plans),
        max_model_len=plans[0].max_model_len,
        available=available - fixed,
    )
    return tuple(replace(plan, num_blocks=num_blocks) for plan in plans)


def _without_blocks(checkpoint: Checkpoint, config: EngineConfig, available: int) -> MemoryPlan:
    model = checkpoint.config
    max_model_len = _context(model, config)
    if model.architecture == "bigram":
        weights, buffers, block_bytes = 4 * math.prod(checkpoint.tensors[BIGRAM_LOGITS].shape), 0, BOOK_BYTES
    else:
        weights = packed_bytes(checkpoint, config.weights) + 4 * max_model_len * model.head_dim
        buffers = _buffers_bytes(model, config, max_model_len)
        block_bytes = _block_bytes(model, config)
    return MemoryPlan(
        vocab_size=model.vocab_size,
        block_size=config.block_size,
        max_model_len=max_model_len,
        num_blocks=0,
        block_bytes=block_bytes,
        weights_bytes=weights,
        buffers_bytes=buffers,
        available_bytes=available,
    )


def dims_of(model: ModelConfig, config: EngineConfig, num_blocks: int) -> Dims:
    """The shapes of a model and of its cache, as kernels take them."""
    return Dims(
        hidden_size=model.hidden_size,
        intermediate_size=model.intermediate_size,
        num_layers=model.num_layers,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        vocab_size=model.vocab_size,
        block_size=config.block_size,
        num_blocks=num_blocks,
        kv_number_bytes=_KV_NUMBER_BYTES[config.kv_dtype],
    )


def buffer_shapes(dims: Dims, config: EngineConfig, max_model_len: int) -> BufferShapes:
    """Every array of ``Work`` but the cache, for the largest step."""
    tokens, logits = _max_rows(config)
    mixed = dims.num_heads * dims.head_dim
    activations = activation_bytes(tokens, max(dims.hidden_size, mixed))
    return {
        "sizes": ((4,), np.int64),
        "token_ids": ((tokens,), np.int32),
        "positions": ((tokens,), np.int32),
        "request_rows": ((tokens,), np.int32),
        "block_tables": ((config.max_num_seqs, -(-max_model_len // dims.block_size)), np.int32),
        "logits_rows": ((logits,), np.int32),
        "hidden_rows": ((tokens,), np.int32),
        "runs": ((tokens + 1,), np.int64),
        "x": ((tokens * dims.hidden_size,), np.float32),
        "normed": ((tokens * max(dims.hidden_size, mixed),), np.float32),
        "quantised": ((activations,), np.uint8),
        "spread": ((activations,), np.uint8),
        "qkv": ((tokens * (dims.num_heads + 2 * dims.num_kv_heads) * dims.head_dim,), np.float32),
        "gate_up": ((tokens * 2 * dims.intermediate_size,), np.float32),
        "acted": ((activation_bytes(tokens, dims.intermediate_size),), np.uint8),
        "logits": ((logits * dims.vocab_size,), np.float32),
        "hidden": ((tokens * dims.hidden_size,), np.float32),
        "attention": ((config.num_threads, scratch_floats(dims.head_dim)), np.float32),
    }


def zeroed(shapes: BufferShapes) -> dict[str, NDArray[Any]]:
    """The arrays; pages nobody writes to cost no memory."""
    return {name: np.zeros(shape, kind) for name, (shape, kind) in shapes.items()}


def _context(model: ModelConfig, config: EngineConfig) -> int:
    longest = model.max_position_embeddings
    if config.max_model_len is not None and config.max_model_len > longest:
        raise ConfigError(f"max_model_len = {config.max_model_len}: the model supports up to {longest}")
    return config.max_model_len or longest


def _max_rows(config: EngineConfig) -> tuple[int, int]:
    """Most tokens of a step, and most rows of logits: each request draws one token, and one more for each draft."""
    drafts = config.speculative.num_tokens if config.speculative else 0
    logits = config.max_num_seqs * (1 + drafts)
    return max(config.max_batch_tokens, logits), logits


def _buffers_bytes(model: ModelConfig, config: EngineConfig, max_model_len: int) -> int:
    shapes = buffer_shapes(dims_of(model, config, 0), config, max_model_len)
    return sum(math.prod(shape) * np.dtype(kind).itemsize for shape, kind in shapes.values())


def _block_bytes(model: ModelConfig, config: EngineConfig) -> int:
    """Bytes of one KV block, over all layers and heads."""
    sub_blocks = model.num_layers * model.num_kv_heads * config.block_size // 16
    return sub_blocks * sub_block_bytes(model.head_dim, _KV_NUMBER_BYTES[config.kv_dtype])
