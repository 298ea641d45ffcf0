"""Bigram checkpoints that say exactly what a test wants, token border by token border.

A script is a sequence of strings, one a token: after the first string the model says the second, and so on, and after
the last one the end of text; a script that ends with a string it already has goes round for ever. The tokenizer is
byte-level BPE with the merges that make each string one token, so it also encodes any prompt. A token has one
successor, so no token may be followed by two different ones; a script usually begins with a letter of its own, which
is the prompt.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tests.model.containers import write_safetensors

EOS = "<eos>"
CERTAIN = 30.0  # the logit of the scripted successor; all others are 0

# Byte-level BPE writes each byte as one printable character: its own where it is printable, else one from 256 up.
_PRINTABLE = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
BYTE_CHARACTERS = {byte: chr(byte) for byte in _PRINTABLE} | {byte: chr(256 + i) for i, byte in enumerate(_OTHERS)}
BYTES = {character: byte for byte, character in BYTE_CHARACTERS.items()}


def write_scripted(directory: Path, scripts: Sequence[Sequence[str | bytes]]) -> dict[bytes, int]:
    """Write config, tokenizer and weights; gives the id of each token's bytes. EOS has the last id."""
    pieces = [[piece if isinstance(piece, bytes) else piece.encode() for piece in script] for script in scripts]
    vocab, merges = _vocabulary([piece for script in pieces for piece in script])
    ids = {bytes(BYTES[character] for character in spelling): number for spelling, number in vocab.items()}
    eos = len(vocab)
    logits = np.zeros((eos + 1, eos + 1), dtype=np.float32)
    logits[:, eos] = 1.0  # what no script continues ends
    for script in pieces:
        successors = [ids[piece] for piece in script[1:]] + ([] if script[-1] in script[:-1] else [eos])
        for piece, successor in zip(script, successors, strict=False):
            row = logits[ids[piece]]
            assert row.max() < CERTAIN or row[successor] == CERTAIN, f"{piece!r} has two successors"
            row[successor] = CERTAIN
    directory.mkdir(parents=True, exist_ok=True)
    config = {"model_type": "bigram", "vocab_size": eos + 1, "max_position_embeddings": 512, "eos_token_id": eos}
    (directory / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    (directory / "tokenizer.json").write_text(json.dumps(_tokenizer(vocab, merges, eos), indent=1) + "\n")
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": EOS}) + "\n")
    write_safetensors(directory / "model.safetensors", {"logits": logits})
    return ids


def _vocabulary(pieces: Sequence[bytes]) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """All 256 bytes, then each piece built up from its left one byte at a time."""
    vocab = {BYTE_CHARACTERS[byte]: byte for byte in range(256)}
    merges: list[tuple[str, str]] = []
    for piece in pieces:
        spelling = "".join(BYTE_CHARACTERS[byte] for byte in piece)
        for end in range(2, len(spelling) + 1):
            if spelling[:end] not in vocab:
                vocab[spelling[:end]] = len(vocab)
                merges.append((spelling[: end - 1], spelling[end - 1]))
    return vocab, merges


def _tokenizer(vocab: dict[str, int], merges: list[tuple[str, str]], eos: int) -> dict[str, object]:
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": eos, "content": EOS, **special}],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": vocab,
            "merges": [list(pair) for pair in merges],
        },
    }
