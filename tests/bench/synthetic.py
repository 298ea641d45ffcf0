"""A GGUF file of the shape of Qwen3-8B with random Q4_0 weights: 4.6 GB in seconds, for speed and memory only."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray

HIDDEN, INTERMEDIATE, LAYERS = 4096, 12288, 36
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
VOCAB = 151_936
CONTEXT = 40_960
BLOCK, BLOCK_BYTES = 32, 18  # Q4_0: a half-precision scale and 32 nibbles
# Nibbles are uniform over -8..7, so with this scale the weights have a deviation of about 1/sqrt(HIDDEN): hidden
# states neither vanish nor overflow.
SCALE = 0.0034


def write_model(path: Path) -> Path:
    """Make the file once; a run that fails leaves no half file."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        _write(part)
        part.rename(path)
    return path


def _write(path: Path) -> None:
    writer = gguf.GGUFWriter(path, "qwen3")
    _add_shape(writer)
    _add_vocabulary(writer)
    pool = _random_blocks(VOCAB * HIDDEN // BLOCK)
    for name, rows, columns in _matrices():
        # Every matrix is a view of the same random bytes: what they are does not matter, how many does.
        row_bytes = columns // BLOCK * BLOCK_BYTES
        data = pool[: rows * row_bytes].reshape(rows, row_bytes)
        writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType.Q4_0)
    for name, size in _norms():
        writer.add_tensor(name, np.ones(size, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_shape(writer: gguf.GGUFWriter) -> None:
    writer.add_name("synthetic-qwen3-8b")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_0)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1_000_000.0)


def _add_vocabulary(writer: gguf.GGUFWriter) -> None:
    """The 256 bytes, a merge because there must be one, and filler up to the size of the real vocabulary."""
    tokens = [_byte_symbol(value) for value in range(256)] + ["Ġt"]
    tokens += [f"<filler_{number}>" for number in range(VOCAB - len(tokens) - 1)] + ["<|endoftext|>"]
    kinds = [gguf.TokenType.NORMAL] * (VOCAB - 1) + [gguf.TokenType.CONTROL]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(["Ġ t"])
    writer.add_eos_token_id(VOCAB - 1)
    writer.add_bos_token_id(VOCAB - 1)
    writer.add_add_bos_token(False)


def _byte_symbol(value: int) -> str:
    """The printable stand-in of a byte in byte-level BPE: itself where it prints, else one from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    if value in printable:
        return chr(value)
    return chr(0x100 + [other for other in range(256) if other not in printable].index(value))


def _random_blocks(count: int) -> NDArray[np.uint8]:
    """[count * BLOCK_BYTES] random nibbles, the same scale everywhere."""
    blocks = np.random.default_rng(0).integers(256, size=(count, BLOCK_BYTES), dtype=np.uint8)
    blocks[:, :2] = np.frombuffer(np.float16(SCALE).tobytes(), np.uint8)
    return blocks.reshape(-1)


def _matrices() -> Iterator[tuple[str, int, int]]:
    """Name, rows, columns."""
    yield "token_embd.weight", VOCAB, HIDDEN
    yield "output.weight", VOCAB, HIDDEN
    for layer in range(LAYERS):
        yield f"blk.{layer}.attn_q.weight", HEADS * HEAD_DIM, HIDDEN
        yield f"blk.{layer}.attn_k.weight", KV_HEADS * HEAD_DIM, HIDDEN
        yield f"blk.{layer}.attn_v.weight", KV_HEADS * HEAD_DIM, HIDDEN
        yield f"blk.{layer}.attn_output.weight", HIDDEN, HEADS * HEAD_DIM
        yield f"blk.{layer}.ffn_gate.weight", INTERMEDIATE, HIDDEN
        yield f"blk.{layer}.ffn_up.weight", INTERMEDIATE, HIDDEN
        yield f"blk.{layer}.ffn_down.weight", HIDDEN, INTERMEDIATE


def _norms() -> Iterator[tuple[str, int]]:
    yield "output_norm.weight", HIDDEN
    for layer in range(LAYERS):
        yield f"blk.{layer}.attn_norm.weight", HIDDEN
        yield f"blk.{layer}.ffn_norm.weight", HIDDEN
        yield f"blk.{layer}.attn_q_norm.weight", HEAD_DIM
        yield f"blk.{layer}.attn_k_norm.weight", HEAD_DIM


if __name__ == "__main__":
    print(write_model(Path(sys.argv[1])))
