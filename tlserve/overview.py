"""What there is to know of a model about to be served, as plain values: for the banner, the log and ``check``."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from tlserve.config import ServeConfig
from tlserve.kernels.jit import TARGET
from tlserve.model.checkpoint import Checkpoint, TextFields
from tlserve.model.plan import MemoryPlan
from tlserve.model.tensors import Tensor
from tlserve.text.template import DEFAULT_TEMPLATE, Template


class _Encoder(Protocol):
    @property
    def template(self) -> Template: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    """A model, the memory it takes in bytes, and what computes it."""

    model_id: str
    path: str
    architecture: str
    parameters: int
    formats: tuple[str, ...]  # of the numbers in its files, the most frequent first
    vocab_size: int
    model_context: int  # the longest that the model supports
    tokenizer: str
    has_own_template: bool
    weights_bytes: int
    buffers_bytes: int
    kv_bytes: int
    draft_bytes: int  # all that the draft model takes; 0 without one
    available_bytes: int
    block_size: int
    block_bytes: int
    num_blocks: int
    max_model_len: int  # the longest request, prompt and answer together
    max_num_seqs: int
    threads: int
    isa: str

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + self.buffers_bytes + self.kv_bytes + self.draft_bytes

    @property
    def num_tokens(self) -> int:
        """Tokens that the KV cache holds."""
        return self.num_blocks * self.block_size

    @property
    def num_full_streams(self) -> int:
        """Requests of the longest context that run at the same time."""
        return min(self.max_num_seqs, self.num_blocks // -(-self.max_model_len // self.block_size))

    @property
    def tokens_each(self) -> int:
        """The context that each of ``max_num_seqs`` requests may have when all run at the same time."""
        return min(self.max_model_len, self.num_blocks // self.max_num_seqs * self.block_size)


def overview_of(
    config: ServeConfig, checkpoint: Checkpoint, plan: MemoryPlan, draft: MemoryPlan | None, encoder: _Encoder
) -> Overview:
    """Gather what is known once the files are open and the memory is planned."""
    return Overview(
        model_id=config.model_id,
        path=str(checkpoint.path),
        architecture=checkpoint.config.architecture,
        parameters=sum(math.prod(tensor.shape) for tensor in checkpoint.tensors.values()),
        formats=_formats(checkpoint.tensors),
        vocab_size=plan.vocab_size,
        model_context=checkpoint.config.max_position_embeddings,
        tokenizer=_tokenizer(checkpoint.text),
        has_own_template=encoder.template.source != DEFAULT_TEMPLATE,
        weights_bytes=plan.weights_bytes,
        buffers_bytes=plan.buffers_bytes,
        kv_bytes=plan.kv_bytes,
        draft_bytes=draft.total_bytes if draft else 0,
        available_bytes=plan.available_bytes,
        block_size=plan.block_size,
        block_bytes=plan.block_bytes,
        num_blocks=plan.num_blocks,
        max_model_len=min(plan.max_model_len, plan.num_tokens),
        max_num_seqs=config.engine.max_num_seqs,
        threads=config.engine.num_threads,
        isa=TARGET.isa,
    )


def _formats(tensors: Mapping[str, Tensor]) -> tuple[str, ...]:
    counts: Counter[str] = Counter()
    for tensor in tensors.values():
        counts[tensor.format.name] += math.prod(tensor.shape)
    return tuple(name for name, _ in counts.most_common())


def _tokenizer(text: TextFields) -> str:
    if text.gguf:
        return f"of the GGUF file ({text.gguf.get('tokenizer.ggml.model')})"
    return "tokenizer.json" if text.tokenizer_json is not None else "bytes"
