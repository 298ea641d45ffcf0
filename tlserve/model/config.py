"""What a model is, in one shape whatever file said it; anything that would be computed wrongly is refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from tlserve.errors import ModelError
from tlserve.model import rope
from tlserve.model.fields import Fields
from tlserve.model.files import shown
from tlserve.model.rope import RopeScaling, YarnScaling

Architecture = Literal["llama", "qwen2", "qwen3", "bigram"]

# A bigram has no positions; something must bound a request.
BIGRAM_CONTEXT = 4096
# What the reference implementation assumes for a qwen3 file that leaves head_dim out.
QWEN3_HEAD_DIM = 128


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The dimensions and variants of a model.

    A bigram has a vocabulary and a context only: its logits row is also its hidden state, so hidden_size is
    vocab_size, and its layers and heads are 0.
    """

    architecture: Architecture
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int  # divides num_heads
    head_dim: int  # even; num_heads * head_dim need not be hidden_size
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    max_position_embeddings: int  # the longest context the file promises, scaling included
    tie_word_embeddings: bool  # what the config says; the head is lm_head.weight wherever a file has one
    attention_bias: bool  # on q_proj, k_proj and v_proj
    output_bias: bool  # on o_proj
    mlp_bias: bool  # on gate_proj, up_proj and down_proj
    qk_norm: bool  # an RMS norm over each head of q and k, before the rotation
    eos_token_ids: frozenset[int]
    bos_token_id: int | None


def inverse_frequencies(config: ModelConfig) -> tuple[NDArray[np.float32], float]:
    """Radians per position of each rotated pair, float32 [head_dim / 2], and the factor on cosines and sines."""
    return rope.inverse_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)


def from_hf(values: Mapping[str, object], file: Path) -> ModelConfig:
    """The config in the keys of a config.json. Raises ModelError naming the file and the key."""
    fields = Fields(values, file)
    match fields.text("model_type"):
        case "bigram":
            return _bigram(fields)
        case "llama" | "qwen2" | "qwen3" as architecture:
            return _hf_transformer(fields, architecture)
        case other:
            raise fields.fault("model_type", f"{shown(other)} is not supported (llama, qwen2, qwen3, bigram)")


def _bigram(fields: Fields) -> ModelConfig:
    vocab_size = fields.integer("vocab_size")
    return ModelConfig(
        architecture="bigram",
        vocab_size=vocab_size,
        hidden_size=vocab_size,
        intermediate_size=0,
        num_layers=0,
        num_heads=0,
        num_kv_heads=0,
        head_dim=0,
        rms_norm_eps=0.0,
        rope_theta=0.0,
        rope_scaling=None,
        max_position_embeddings=fields.integer("max_position_embeddings", default=BIGRAM_CONTEXT),
        tie_word_embeddings=False,
        attention_bias=False,
        output_bias=False,
        mlp_bias=False,
        qk_norm=False,
        eos_token_ids=fields.token_ids("eos_token_id", vocab_size),
        bos_token_id=_one_token(fields, "bos_token_id", vocab_size),
    )


def _hf_transformer(fields: Fields, architecture: Literal["llama", "qwen2", "qwen3"]) -> ModelConfig:
    _refuse_hf_variants(fields)
    vocab_size = fields.integer("vocab_size")
    num_heads = fields.integer("num_attention_heads")
    max_positions = fields.integer("max_position_embeddings")
    theta, scaling = rope.rope_from_hf(fields, max_positions)
    biased = architecture != "qwen2" and fields.flag("attention_bias", default=False)
    return ModelConfig(
        architecture=architecture,
        vocab_size=vocab_size,
        hidden_size=fields.integer("hidden_size"),
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=fields.integer("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=_kv_heads(fields, "num_key_value_heads", num_heads),
        head_dim=_hf_head_dim(fields, architecture, num_heads),
        rms_norm_eps=fields.number("rms_norm_eps", default=1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        max_position_embeddings=_stretched(max_positions, scaling),
        tie_word_embeddings=fields.flag("tie_word_embeddings", default=False),
        attention_bias=biased or architecture == "qwen2",  # a qwen2 file has no flag for its bias
        output_bias=biased,
        mlp_bias=architecture == "llama" and fields.flag("mlp_bias", default=False),
        qk_norm=architecture == "qwen3",
        eos_token_ids=fields.token_ids("eos_token_id", vocab_size),
        bos_token_id=_one_token(fields, "bos_token_id", vocab_size),
    )


def _refuse_hf_variants(fields: Fields) -> None:
    activation = fields.text("hidden_act", default="silu")
    if activation not in ("silu", "swish"):  # two names of one function
        raise fields.fault("hidden_act", f"{shown(activation)} is not supported (silu)")
    quantisation = fields.section("quantization_config")
    if quantisation is not None:
        method = quantisation.text("quant_method", default="unnamed")
        raise fields.fault("quantization_config", f"with quant_method {shown(method)} is not supported")
    layers = fields.values.get("layer_types") or []
    kinds = layers if isinstance(layers, list) else [layers]
    unsupported = next((kind for kind in kinds if kind != "full_attention"), None)
    if unsupported is not None:
        raise fields.fault("layer_types", f"{shown(unsupported)} is not supported (full_attention)")
    if fields.flag("use_sliding_window", default=fields.values.get("model_type") == "llama"):
        _refuse_sliding_window(fields, "sliding_window", "max_position_embeddings")


def _refuse_sliding_window(fields: Fields, key: str, context_key: str) -> None:
    """A window as wide as the context changes nothing; a narrower one would."""
    if fields.has(key) and 0 < fields.integer(key, low=0) < fields.integer(context_key):
        raise fields.fault(key, "narrower than the context is not supported")


def _hf_head_dim(fields: Fields, architecture: str, num_heads: int) -> int:
    if architecture == "qwen3" and "head_dim" not in fields.values:
        return QWEN3_HEAD_DIM
    return _head_dim(fields, "head_dim", "hidden_size", num_heads)


def _head_dim(fields: Fields, key: str, hidden_key: str, num_heads: int) -> int:
    """The explicit dimension, or the hidden size split over the heads."""
    hidden_size = fields.integer(hidden_key)
    if not fields.has(key) and hidden_size % num_heads:
        raise fields.fault(hidden_key, f"{hidden_size} is not a multiple of the {num_heads} attention heads")
    head_dim = fields.integer(key, default=hidden_size // num_heads)
    if head_dim % 2:
        raise fields.fault(key, f"must be even to be rotated in pairs, got {head_dim}")
    return head_dim


def _kv_heads(fields: Fields, key: str, num_heads: int) -> int:
    num_kv_heads = fields.integer(key, default=num_heads)
    if num_heads % num_kv_heads:
        raise fields.fault(key, f"{num_kv_heads} does not divide the {num_heads} attention heads")
    return num_kv_heads


def _stretched(max_positions: int, scaling: RopeScaling | None) -> int:
    """YaRN is switched on by adding it to a config whose context length stays the original one."""
    if not isinstance(scaling, YarnScaling):
        return max_positions
    return max(max_positions, int(scaling.factor * scaling.original_max_position_embeddings))


def _one_token(fields: Fields, key: str, vocab_size: int) -> int | None:
    return min(fields.token_ids(key, vocab_size), default=None)


def from_gguf(
    values: Mapping[str, object],
    shapes: Mapping[str, tuple[int, ...]],
    file: Path,
    *,
    pair_factors: tuple[float, ...] | None = None,
) -> ModelConfig:
    """The config in the fields of a GGUF file.

    What the fields leave out is read from the tensors: the vocabulary's size from `shapes` (by GGUF name), tying
    and biases from which tensors exist. `pair_factors` are the values of the rope_freqs tensor, if there is one.
    Raises ModelError naming the file and the field.
    """
    general = Fields(values, file)
    architecture = _gguf_architecture(general)
    prefix = f"{architecture}."
    own = {key.removeprefix(prefix): value for key, value in values.items() if key.startswith(prefix)}
    fields = Fields(own, file, prefix)
    _refuse_gguf_variants(fields)
    if "token_embd.weight" not in shapes:
        raise ModelError(f"{file}: tensor token_embd.weight is missing")
    vocab_size = shapes["token_embd.weight"][0]
    num_heads = fields.integer("attention.head_count")
    max_positions = fields.integer("context_length")
    theta, scaling = rope.rope_from_gguf(fields, max_positions, pair_factors)
    return ModelConfig(
        architecture=architecture,
        vocab_size=vocab_size,
        hidden_size=fields.integer("embedding_length"),
        intermediate_size=fields.integer("feed_forward_length"),
        num_layers=fields.integer("block_count"),
        num_heads=num_heads,
        num_kv_heads=_kv_heads(fields, "attention.head_count_kv", num_heads),
        head_dim=_gguf_head_dim(fields, num_heads),
        rms_norm_eps=fields.number("attention.layer_norm_rms_epsilon"),
        rope_theta=theta,
        rope_scaling=scaling,
        max_position_embeddings=_stretched(max_positions, scaling),
        tie_word_embeddings="output.weight" not in shapes,
        attention_bias=architecture == "qwen2" or "blk.0.attn_q.bias" in shapes,
        output_bias="blk.0.attn_output.bias" in shapes,
        mlp_bias="blk.0.ffn_gate.bias" in shapes,
        qk_norm=architecture == "qwen3",
        eos_token_ids=_gguf_eos(general, vocab_size),
        bos_token_id=_one_token(general, "tokenizer.ggml.bos_token_id", vocab_size),
    )


def _gguf_architecture(general: Fields) -> Literal["llama", "qwen2", "qwen3"]:
    match general.text("general.architecture"):
        case "llama" | "qwen2" | "qwen3" as architecture:
            return architecture
        case other:
            raise general.fault("general.architecture", f"{shown(other)} is not supported (llama, qwen2, qwen3)")


def _refuse_gguf_variants(fields: Fields) -> None:
    if fields.has("expert_count") and fields.integer("expert_count", low=0) > 0:
        raise fields.fault("expert_count", "above 0 (a mixture of experts) is not supported")
    _refuse_sliding_window(fields, "attention.sliding_window", "context_length")


def _gguf_head_dim(fields: Fields, num_heads: int) -> int:
    head_dim = _head_dim(fields, "attention.key_length", "embedding_length", num_heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if fields.integer(key, default=head_dim) != head_dim:
            raise fields.fault(key, f"other than the head's {head_dim} is not supported")
    return head_dim


def _gguf_eos(general: Fields, vocab_size: int) -> frozenset[int]:
    """End of text, of turn and of message: a chat model may end its answer with any of them."""
    names = ("eos", "eot", "eom")
    return frozenset().union(*(general.token_ids(f"tokenizer.ggml.{name}_token_id", vocab_size) for name in names))
