"""What the engine calls a model: one forward pass per step, over buffers that are allocated once."""

from __future__ import annotations

from typing import Protocol

from tlserve.config import EngineConfig
from tlserve.errors import ConfigError
from tlserve.kernels.forward import Forward
from tlserve.kernels.jit import TARGET
from tlserve.kernels.pack import allocate
from tlserve.kernels.state import Work
from tlserve.model.batch import Batch, ForwardOutput
from tlserve.model.checkpoint import Checkpoint, fingerprint
from tlserve.model.layout import BIGRAM_LOGITS
from tlserve.model.plan import BufferShapes, MemoryPlan, buffer_shapes, dims_of, plan_memory, zeroed
from tlserve.model.quants import dequantise
from tlserve.model.weights import Progress, load_weights


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
    checkpoint: Checkpoint,
    config: EngineConfig,
    progress: Progress = lambda what, done, total: None,
    *,
    plan: MemoryPlan | None = None,
) -> Runner:
    """Pack a checkpoint's weights and allocate its KV cache, as ``plan`` has it or one made now.

    ``progress`` is told what is worked on, "kernels" or "weights", how much is done and how much there is. Raises
    ConfigError when the configured context is longer than the model's, or memory is too small.
    """
    plan = plan_memory((checkpoint, config))[0] if plan is None else plan
    if checkpoint.config.architecture == "bigram":
        return BigramRunner(checkpoint, plan)
    return ModelRunner(checkpoint, config, plan, progress)


class ModelRunner:
    """A transformer on the kernels. Its KV blocks and buffers live as long as it does."""

    def __init__(self, checkpoint: Checkpoint, config: EngineConfig, plan: MemoryPlan, progress: Progress) -> None:
        model = checkpoint.config
        self.vocab_size = plan.vocab_size
        self.hidden_size = model.hidden_size
        self.block_size = plan.block_size
        self.max_model_len = plan.max_model_len
        self.num_blocks = plan.num_blocks
        dims = dims_of(model, config, plan.num_blocks)
        weights = load_weights(
            checkpoint, config.weights, plan.max_model_len, dims.kv_number_bytes, config.num_threads, progress
        )
        # The samples it takes are from all over the files, which have been read by now.
        self.fingerprint = "-".join([fingerprint(checkpoint), config.weights, config.kv_dtype, TARGET.isa])
        self._work = _allocate(buffer_shapes(dims, config, plan.max_model_len), plan.kv_bytes)
        self._forward = Forward(dims, weights, self._work, config.num_threads)

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


def _allocate(shapes: BufferShapes, kv_bytes: int) -> Work:
    """The cache and the buffers of the largest step; pages nobody writes to cost no memory."""
    try:
        return Work(kv=allocate(kv_bytes), **zeroed(shapes))
    except (MemoryError, OSError):
        raise ConfigError(f"the KV cache ({kv_bytes >> 20} MiB) and buffers do not fit in memory") from None


class BigramRunner:
    """The table of a bigram as a model: the logits after a token are its row, and so is its hidden state.

    It has positions and blocks like any other model, and keeps nothing in them.
    """

    def __init__(self, checkpoint: Checkpoint, plan: MemoryPlan) -> None:
        self.vocab_size = plan.vocab_size
        self.hidden_size = checkpoint.config.hidden_size
        self.block_size = plan.block_size
        self.max_model_len = plan.max_model_len
        self.num_blocks = plan.num_blocks
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
