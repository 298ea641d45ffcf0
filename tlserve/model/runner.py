"""What the engine calls a model: one forward pass per step, over buffers that are allocated once."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tlserve.config import EngineConfig
from tlserve.errors import ConfigError
from tlserve.kernels.attention import scratch_floats
from tlserve.kernels.forward import Forward
from tlserve.kernels.jit import TARGET
from tlserve.kernels.kv_cache import sub_block_bytes
from tlserve.kernels.pack import allocate
from tlserve.kernels.product import activation_bytes
from tlserve.kernels.state import Dims, Work
from tlserve.model.batch import Batch, ForwardOutput
from tlserve.model.checkpoint import Checkpoint, fingerprint
from tlserve.model.config import ModelConfig
from tlserve.model.layout import BIGRAM_LOGITS
from tlserve.model.memory import available_memory, num_kv_blocks
from tlserve.model.quants import dequantise
from tlserve.model.weights import Progress, load_weights

_KV_NUMBER_BYTES = {"f16": 2, "f32": 4}


class Runner(Protocol):
    """A loaded model. ``forward`` is called from one thread at a time; ``close`` after the last call."""

    vocab_size: int
    max_model_len: int
    block_size: int
    num_blocks: int
    hidden_size: int
    fingerprint: str  # of the weights and of every setting that changes the numbers

    def forward(self, batch: Batch) -> ForwardOutput: ...

    def close(self) -> None: ...


def load_runner(
    checkpoint: Checkpoint, config: EngineConfig, progress: Progress = lambda what, done, total: None
) -> Runner:
    """Pack a checkpoint's weights and allocate its KV cache.

    ``progress`` is told what is worked on, "kernels" or "weights", how much is done and how much there is. Raises
    ConfigError when the configured context is longer than the model's, or memory is too small.
    """
    if checkpoint.config.architecture == "bigram":
        return BigramRunner(checkpoint, config)
    return ModelRunner(checkpoint, config, progress)


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


BOOK_BYTES = 64  # of the engine's books for a block, which are all that a block of a bigram takes


class ModelRunner:
    """A transformer on the kernels. Its KV blocks and buffers live as long as it does."""

    def __init__(self, checkpoint: Checkpoint, config: EngineConfig, progress: Progress) -> None:
        model = checkpoint.config
        self.vocab_size = model.vocab_size
        self.hidden_size = model.hidden_size
        self.block_size = config.block_size
        self.max_model_len = _context(model, config)
        self.fingerprint = "-".join([fingerprint(checkpoint), config.weights, config.kv_dtype, TARGET.isa])
        number_bytes = _KV_NUMBER_BYTES[config.kv_dtype]
        weights = load_weights(checkpoint, config.weights, self.max_model_len, number_bytes, progress)
        block_bytes = _block_bytes(model, config)
        self.num_blocks = num_kv_blocks(
            config, block_bytes=block_bytes, max_model_len=self.max_model_len, available=available_memory()
        )
        self._dims = _dims(model, config, self.num_blocks)
        self._work = _allocate(self._dims, config, self.max_model_len, self.num_blocks * block_bytes)
        self._forward = Forward(self._dims, weights, self._work, config.num_threads)

    def forward(self, batch: Batch) -> ForwardOutput:
        """Run one step. The arrays of the result are valid until the next call."""
        work = self._work
        num_requests, num_blocks = batch.block_tables.shape
        assert batch.token_ids.size <= work.token_ids.size, "more tokens than max_batch_tokens"
        assert batch.logits_rows.size <= work.logits_rows.size, "more logits rows than requests and drafts"
        assert num_requests <= len(work.block_tables), "more requests than max_num_seqs"
        work.sizes[:3] = batch.token_ids.size, batch.logits_rows.size, batch.hidden_rows.size
        work.block_tables[:num_requests, :num_blocks] = batch.block_tables
        for room, given in (
            (work.token_ids, batch.token_ids),
            (work.positions, batch.positions),
            (work.request_rows, batch.request_rows),
            (work.logits_rows, batch.logits_rows),
            (work.hidden_rows, batch.hidden_rows),
        ):
            room[: given.size] = given
        self._forward()
        return ForwardOutput(
            logits=work.logits[: batch.logits_rows.size * self.vocab_size].reshape(-1, self.vocab_size),
            hidden=work.hidden[: batch.hidden_rows.size * self.hidden_size].reshape(-1, self.hidden_size),
        )

    def close(self) -> None:
        """End the compute threads; idempotent."""
        self._forward.close()


def _block_bytes(model: ModelConfig, config: EngineConfig) -> int:
    """Bytes of one KV block, over all layers and heads."""
    sub_blocks = model.num_layers * model.num_kv_heads * config.block_size // 16
    return sub_blocks * sub_block_bytes(model.head_dim, _KV_NUMBER_BYTES[config.kv_dtype])


def _dims(model: ModelConfig, config: EngineConfig, num_blocks: int) -> Dims:
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


def _allocate(dims: Dims, config: EngineConfig, max_model_len: int, kv_bytes: int) -> Work:
    """Buffers for the largest step; pages nobody writes to cost no memory."""
    tokens, logits = _max_rows(config)
    mixed = dims.num_heads * dims.head_dim
    widest = max(dims.hidden_size, mixed, dims.intermediate_size)
    tables = (config.max_num_seqs, -(-max_model_len // dims.block_size))
    try:
        return Work(
            sizes=np.zeros(4, np.int64),
            token_ids=np.zeros(tokens, np.int32),
            positions=np.zeros(tokens, np.int32),
            request_rows=np.zeros(tokens, np.int32),
            block_tables=np.zeros(tables, np.int32),
            logits_rows=np.zeros(logits, np.int32),
            hidden_rows=np.zeros(tokens, np.int32),
            kv=allocate(kv_bytes),
            runs=np.zeros(tokens + 1, np.int64),
            x=_floats(tokens, dims.hidden_size),
            normed=_floats(tokens, max(dims.hidden_size, mixed)),
            quantised=np.zeros(activation_bytes(tokens, widest), np.uint8),
            spread=np.zeros(activation_bytes(tokens, widest), np.uint8),
            qkv=_floats(tokens, (dims.num_heads + 2 * dims.num_kv_heads) * dims.head_dim),
            gate_up=_floats(tokens, 2 * dims.intermediate_size),
            acted=_floats(tokens, dims.intermediate_size),
            logits=_floats(logits, dims.vocab_size),
            hidden=_floats(tokens, dims.hidden_size),
            attention=np.zeros((config.num_threads, scratch_floats(dims.head_dim)), np.float32),
        )
    except (MemoryError, OSError):
        raise ConfigError(f"the KV cache ({kv_bytes >> 20} MiB) and buffers do not fit in memory") from None


def _floats(rows: int, columns: int) -> NDArray[np.float32]:
    return np.zeros(rows * columns, np.float32)


class BigramRunner:
    """The table of a bigram as a model: the logits after a token are its row, and so is its hidden state.

    It has positions and blocks like any other model, and keeps nothing in them.
    """

    def __init__(self, checkpoint: Checkpoint, config: EngineConfig) -> None:
        model = checkpoint.config
        self.vocab_size = model.vocab_size
        self.hidden_size = model.hidden_size
        self.block_size = config.block_size
        self.max_model_len = _context(model, config)
        self.num_blocks = num_kv_blocks(
            config, block_bytes=BOOK_BYTES, max_model_len=self.max_model_len, available=available_memory()
        )
        self.fingerprint = fingerprint(checkpoint)
        self._table = dequantise(checkpoint.tensors[BIGRAM_LOGITS])

    def forward(self, batch: Batch) -> ForwardOutput:
        """Look up the rows that are wanted; the result is the caller's own."""
        return ForwardOutput(
            logits=self._table[batch.token_ids[batch.logits_rows]],
            hidden=self._table[batch.token_ids[batch.hidden_rows]],
        )

    def close(self) -> None:
        """Nothing to end."""
