"""Which tensors a model of a given config has: canonical names, shapes, and their names in GGUF files."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from tlserve.model.config import ModelConfig

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"
BIGRAM_LOGITS = "logits"  # [V, V]: row = last token, column = next token

_GGUF_TOP = {EMBEDDING: "token_embd.weight", FINAL_NORM: "output_norm.weight", HEAD: "output.weight"}
_GGUF_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_LAYER_NAME = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")


def expected_tensors(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Canonical name and shape of every tensor of the model, except the head; a matrix is [outputs, inputs].

    Lazy, because the number of layers is whatever a file says.
    """
    if config.architecture == "bigram":
        yield BIGRAM_LOGITS, (config.vocab_size, config.vocab_size)
        return
    yield EMBEDDING, (config.vocab_size, config.hidden_size)
    yield FINAL_NORM, (config.hidden_size,)
    for layer in range(config.num_layers):
        for name, shape in _layer_tensors(config):
            yield f"model.layers.{layer}.{name}", shape


def _layer_tensors(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, intermediate = config.hidden_size, config.intermediate_size
    query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    yield "input_layernorm.weight", (hidden,)
    yield "post_attention_layernorm.weight", (hidden,)
    if config.qk_norm:
        yield "self_attn.q_norm.weight", (config.head_dim,)
        yield "self_attn.k_norm.weight", (config.head_dim,)
    for name, outputs, inputs, has_bias in (
        ("self_attn.q_proj", query, hidden, config.attention_bias),
        ("self_attn.k_proj", key, hidden, config.attention_bias),
        ("self_attn.v_proj", key, hidden, config.attention_bias),
        ("self_attn.o_proj", hidden, query, config.output_bias),
        ("mlp.gate_proj", intermediate, hidden, config.mlp_bias),
        ("mlp.up_proj", intermediate, hidden, config.mlp_bias),
        ("mlp.down_proj", hidden, intermediate, config.mlp_bias),
    ):
        yield f"{name}.weight", (outputs, inputs)
        if has_bias:
            yield f"{name}.bias", (outputs,)


def gguf_name(name: str) -> str:
    """The name in a GGUF file of the tensor with this canonical name."""
    match = _LAYER_NAME.fullmatch(name)
    if match is None:
        return _GGUF_TOP[name]
    layer, part, kind = match.groups()
    return f"blk.{layer}.{_GGUF_LAYER[part]}.{kind}"


def rotated_heads(name: str, config: ModelConfig) -> int:
    """How many heads the outputs of this projection are, if they are rotated; else 0."""
    if ".self_attn.q_proj." in name:
        return config.num_heads
    return config.num_kv_heads if ".self_attn.k_proj." in name else 0


def interleaved_order(num_heads: int, head_dim: int) -> NDArray[np.intp]:
    """Where the rows of q and k are in the GGUF file of a llama model, [num_heads * head_dim].

    Such files keep the two elements of a rotated pair side by side; everything else, and this package, keeps them
    half a head apart: row h, i of the first half is stored at h, 2i and of the second half at h, 2i + 1.
    """
    stored = np.arange(num_heads * head_dim, dtype=np.intp)
    return stored.reshape(num_heads, head_dim // 2, 2).transpose(0, 2, 1).reshape(-1)
