"""The slow, obvious forward pass that everything fast is compared with.

Dense, no cache, one sequence, float32 (or float64) weights from the plain dequantisation. Nothing here is shared
with the kernels except the checkpoint and the rotary frequencies, and both have their own oracles.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tlserve.model.checkpoint import Checkpoint
from tlserve.model.config import inverse_frequencies
from tlserve.model.layout import BIGRAM_LOGITS, EMBEDDING, FINAL_NORM
from tlserve.model.quants import dequantise

Floats = NDArray[np.floating]


class ReferenceModel:
    """A model of any family as float arrays; `dtype=np.float64` for a tighter oracle."""

    def __init__(self, checkpoint: Checkpoint, *, dtype: type[np.floating] = np.float32) -> None:
        self.config = checkpoint.config
        self.dtype = dtype
        self.weights = {name: dequantise(tensor).astype(dtype) for name, tensor in checkpoint.tensors.items()}
        self.head = self.weights.get("lm_head.weight", self.weights.get(EMBEDDING))

    def logits(self, token_ids: Sequence[int]) -> Floats:
        """Logits after each token, [num_tokens, vocab_size]."""
        if self.config.architecture == "bigram":
            return self.weights[BIGRAM_LOGITS][list(token_ids)]
        assert self.head is not None
        return self.hidden(token_ids) @ self.head.T

    def hidden(self, token_ids: Sequence[int]) -> Floats:
        """Final-normed hidden state of each token, [num_tokens, hidden_size]."""
        x = self.weights[EMBEDDING][list(token_ids)]
        for layer in range(self.config.num_layers):
            x = x + self._attention(self._norm(x, f"model.layers.{layer}.input_layernorm"), layer)
            x = x + self._mlp(self._norm(x, f"model.layers.{layer}.post_attention_layernorm"), layer)
        return self._norm(x, FINAL_NORM.removesuffix(".weight"))

    def greedy(self, token_ids: Sequence[int], num_tokens: int) -> list[int]:
        """The next `num_tokens` tokens, each the most likely one (the lowest id of equals); EOS does not stop it."""
        tokens = list(token_ids)
        for _ in range(num_tokens):
            tokens.append(int(np.argmax(self.logits(tokens)[-1])))
        return tokens[len(token_ids) :]

    def _attention(self, x: Floats, layer: int) -> Floats:
        config, name = self.config, f"model.layers.{layer}.self_attn"
        num_tokens, group = len(x), config.num_heads // config.num_kv_heads
        q = self._linear(x, f"{name}.q_proj").reshape(num_tokens, config.num_heads, config.head_dim)
        k = self._linear(x, f"{name}.k_proj").reshape(num_tokens, config.num_kv_heads, config.head_dim)
        v = self._linear(x, f"{name}.v_proj").reshape(num_tokens, config.num_kv_heads, config.head_dim)
        if config.qk_norm:
            q, k = self._norm(q, f"{name}.q_norm"), self._norm(k, f"{name}.k_norm")
        q, k = self._rotate(q), self._rotate(k)
        k, v = k.repeat(group, axis=1), v.repeat(group, axis=1)
        scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(self.dtype(config.head_dim))
        future = np.triu(np.ones((num_tokens, num_tokens), dtype=bool), 1)
        mixed = np.einsum("hqk,khd->qhd", _softmax(np.where(future, -np.inf, scores)), v)
        return self._linear(mixed.reshape(num_tokens, -1), f"{name}.o_proj")

    def _mlp(self, x: Floats, layer: int) -> Floats:
        name = f"model.layers.{layer}.mlp"
        gate = self._linear(x, f"{name}.gate_proj")
        return self._linear(gate / (1 + np.exp(-gate)) * self._linear(x, f"{name}.up_proj"), f"{name}.down_proj")

    def _linear(self, x: Floats, name: str) -> Floats:
        y: Floats = x @ self.weights[f"{name}.weight"].T
        if f"{name}.bias" in self.weights:
            y = y + self.weights[f"{name}.bias"]
        return y

    def _norm(self, x: Floats, name: str) -> Floats:
        variance = np.mean(x * x, axis=-1, keepdims=True)
        normed: Floats = x / np.sqrt(variance + self.dtype(self.config.rms_norm_eps))
        return np.multiply(normed, self.weights[f"{name}.weight"])

    def _rotate(self, x: Floats) -> Floats:
        """Turn element i of each head together with element i + head_dim / 2; x is [num_tokens, heads, head_dim]."""
        frequencies, factor = inverse_frequencies(self.config)
        angles = np.arange(len(x), dtype=np.float32)[:, np.newaxis] * frequencies
        cos = (np.cos(angles) * np.float32(factor))[:, np.newaxis].astype(self.dtype)
        sin = (np.sin(angles) * np.float32(factor))[:, np.newaxis].astype(self.dtype)
        first, second = np.split(x, 2, axis=-1)
        rotated: Floats = np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
        return rotated


def _softmax(scores: Floats) -> Floats:
    exponentials: Floats = np.exp(scores - scores.max(axis=-1, keepdims=True))
    total: Floats = exponentials.sum(axis=-1, keepdims=True)
    return np.divide(exponentials, total)
