"""A model's files as one thing: config, tensors under one set of names, and what its text side is made from.

Whatever the file, tensors have their Hugging Face names (`model.layers.0.self_attn.q_proj.weight`), matrices are
[outputs, inputs], and the two elements of a rotated pair are half a head apart. Every tensor that the config calls
for is there with the right shape, and no tensor that would change the result is left over, so whoever packs or
computes may index `tensors` by name without looking. A model whose head is its embedding has no lm_head.weight:
`head` gives the tensor to use.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path

import numpy as np

from tlserve.errors import ModelError
from tlserve.model import config as model_config
from tlserve.model import safetensors
from tlserve.model.config import ModelConfig
from tlserve.model.fields import Fields
from tlserve.model.files import MAX_TOKENIZER_BYTES, read_bytes, read_json_object, read_text, shown
from tlserve.model.gguf import GgufFile, Value, read_gguf
from tlserve.model.layout import (
    BIGRAM_LOGITS,
    EMBEDDING,
    HEAD,
    expected_tensors,
    gguf_name,
    interleaved_order,
    rotated_heads,
)
from tlserve.model.quants import dequantise
from tlserve.model.tensors import Format, Tensor

# Tokenizers that would have to be converted first; silently serving such a model byte by byte would be nonsense.
_OTHER_TOKENIZERS = ("tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")
_FINGERPRINT_SAMPLE = 4096
_COMPARED_ROWS = 4096  # at a time, so that heads that differ are told apart by their first rows


@dataclass(frozen=True, slots=True)
class TextFields:
    """What a tokenizer and a chat template are made from, as plain values.

    A part whose file does not exist is None or empty. With neither `tokenizer_json` nor `gguf` the model reads bytes.
    """

    vocab_size: int
    tokenizer_json: bytes | None = None
    tokenizer_config: Mapping[str, object] = field(default_factory=dict)  # tokenizer_config.json
    generation_config: Mapping[str, object] = field(default_factory=dict)  # generation_config.json
    chat_template_jinja: str | None = None  # chat_template.jinja
    gguf: Mapping[str, object] = field(default_factory=dict)  # the tokenizer.* fields: str, int, float, bool, lists


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """An open model. Tensor bytes are read from disk as they are touched; arrays keep their file mapped."""

    path: Path
    config: ModelConfig
    tensors: Mapping[str, Tensor]
    text: TextFields

    @property
    def head(self) -> Tensor:
        """The matrix that gives the logits, [vocab_size, hidden_size]: lm_head, or the embedding where tied."""
        return self.tensors.get(HEAD) or self.tensors[EMBEDDING]


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a Hugging Face directory, a directory that holds one .gguf file, or a .gguf file.

    Raises ModelError, with one line that names the file and the tensor or field, for anything else and for
    whatever cannot be computed exactly as its files mean it.
    """
    try:
        return _open(path)
    except OSError as error:  # of looking for files; those of reading them are named where they happen
        raise ModelError(f"{error.filename or path}: {error.strerror}") from error


def _open(path: Path) -> Checkpoint:
    if path.is_dir():
        if (path / "config.json").exists() and safetensors.has_safetensors(path):
            return _open_directory(path)
        return _open_gguf(_only_gguf(path), path)
    if path.suffix != ".gguf":
        raise ModelError(f"{path}: {'not a model directory or .gguf file' if path.exists() else 'does not exist'}")
    return _open_gguf(path, None)


def fingerprint(checkpoint: Checkpoint) -> str:
    """16 hex digits that identify the weights: names, shapes, formats and the beginning of each tensor's bytes."""
    digest = hashlib.blake2b(repr(checkpoint.config).encode(), digest_size=8)
    for name, tensor in sorted(checkpoint.tensors.items()):
        digest.update(f"{name} {tensor.shape} {tensor.format.name}".encode())
        digest.update(tensor.stored.reshape(-1)[:_FINGERPRINT_SAMPLE].tobytes())
    return digest.hexdigest()


def _only_gguf(directory: Path) -> Path:
    paths = sorted(directory.glob("*.gguf"))
    if len(paths) == 1:
        return paths[0]
    if paths:
        raise ModelError(f"{directory}: holds {len(paths)} .gguf files; name one of them")
    if (directory / "config.json").exists():
        raise ModelError(f"{directory}: config.json has no *.safetensors beside it")
    raise ModelError(f"{directory}: holds neither config.json with *.safetensors nor a .gguf file")


def _open_directory(directory: Path) -> Checkpoint:
    config_file = directory / "config.json"
    config = model_config.from_hf(read_json_object(config_file), config_file)
    text = _text_files(directory, config.vocab_size)
    tensors = safetensors.read_directory(directory)
    if config.architecture == "bigram":
        tensors = _bigram_logits(tensors, directory)
    else:
        tensors = {name: tensor for name, tensor in tensors.items() if not name.endswith("rotary_emb.inv_freq")}
    _check_tensors(tensors, config, directory)
    return Checkpoint(directory, _with_eos_of(text, config, directory), _without_copied_head(tensors), text)


def _bigram_logits(tensors: dict[str, Tensor], directory: Path) -> dict[str, Tensor]:
    """The one tensor of a bigram, whatever it is called."""
    if len(tensors) != 1:
        raise ModelError(f"{directory}: a bigram has one tensor, found {len(tensors)}")
    (tensor,) = tensors.values()
    if tensor.format is not Format.F32:
        raise ModelError(f"{directory}: tensor {shown(tensor.name)} must be F32, got {tensor.format.name}")
    return {BIGRAM_LOGITS: replace(tensor, name=BIGRAM_LOGITS)}


def _without_copied_head(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Some tied models are saved with their embedding written twice; kept apart it would take twice the memory."""
    if HEAD not in tensors:
        return tensors
    head, embedding = tensors[HEAD], tensors[EMBEDDING]
    pieces = (slice(row, row + _COMPARED_ROWS) for row in range(0, len(head.stored), _COMPARED_ROWS))
    is_copy = head.format is embedding.format and all(
        np.array_equal(head.stored[rows], embedding.stored[rows]) for rows in pieces
    )
    return {name: tensor for name, tensor in tensors.items() if name != HEAD} if is_copy else tensors


def _check_tensors(tensors: Mapping[str, Tensor], config: ModelConfig, file: Path) -> None:
    left = set(tensors)
    for name, shape in expected_tensors(config):
        _check_tensor(tensors, name, shape, file)
        left.discard(name)
    if config.architecture != "bigram" and (HEAD in tensors or not config.tie_word_embeddings):
        _check_tensor(tensors, HEAD, (config.vocab_size, config.hidden_size), file)
        left.discard(HEAD)
    if left:
        raise ModelError(
            f"{file}: tensor {shown(min(left))} has no place in a {config.architecture} model of this config"
        )


def _check_tensor(tensors: Mapping[str, Tensor], name: str, shape: tuple[int, ...], file: Path) -> None:
    if name not in tensors:
        raise ModelError(f"{file}: tensor {name!r} is missing")
    if tensors[name].shape != shape:
        raise ModelError(f"{file}: tensor {name!r} must have shape {list(shape)}, got {list(tensors[name].shape)}")
    if len(shape) == 1 and tensors[name].format.is_quantised:
        raise ModelError(f"{file}: tensor {name!r} is a vector and must be F32, F16 or BF16")


def _text_files(directory: Path, vocab_size: int) -> TextFields:
    tokenizer, template = directory / "tokenizer.json", directory / "chat_template.jinja"
    if not tokenizer.exists():
        for name in _OTHER_TOKENIZERS:
            if (directory / name).exists():
                raise ModelError(f"{directory / name}: this kind of tokenizer is not supported; tokenizer.json is")
    return TextFields(
        vocab_size=vocab_size,
        tokenizer_json=read_bytes(tokenizer, limit=MAX_TOKENIZER_BYTES) if tokenizer.exists() else None,
        tokenizer_config=_object_if_exists(directory / "tokenizer_config.json"),
        generation_config=_object_if_exists(directory / "generation_config.json"),
        chat_template_jinja=read_text(template) if template.exists() else None,
    )


def _object_if_exists(path: Path) -> dict[str, object]:
    return read_json_object(path) if path.exists() else {}


def _with_eos_of(text: TextFields, config: ModelConfig, directory: Path) -> ModelConfig:
    """The config with the stop tokens of generation_config.json added to its own."""
    fields = Fields(text.generation_config, directory / "generation_config.json")
    return replace(config, eos_token_ids=config.eos_token_ids | fields.token_ids("eos_token_id", config.vocab_size))


def _open_gguf(path: Path, directory: Path | None) -> Checkpoint:
    """`directory` is the model directory, whose generation_config.json and template count too; None: a bare file."""
    file = read_gguf(path)
    if Fields(file.fields, path).integer("split.count", default=1, low=0) > 1:
        raise ModelError(f"{path}: field split.count: a model split over several files is not supported")
    named = dict(file.tensors)
    factors = named.pop("rope_freqs.weight", None)
    shapes = {name: tensor.shape for name, tensor in named.items()}
    config = model_config.from_gguf(file.fields, shapes, path, pair_factors=_pair_factors(factors, path))
    if factors is not None and factors.shape != (config.head_dim // 2,):
        raise ModelError(
            f"{path}: tensor rope_freqs.weight must have shape {[config.head_dim // 2]}, got {list(factors.shape)}"
        )
    tensors = _canonical_tensors(named, config, path)
    text = _gguf_text(file, directory, config.vocab_size)
    return Checkpoint(path, _with_eos_of(text, config, directory or path), tensors, text)


def _pair_factors(tensor: Tensor | None, path: Path) -> tuple[float, ...] | None:
    if tensor is None:
        return None
    factors = dequantise(tensor).reshape(-1)
    if not (np.isfinite(factors) & (factors > 0)).all():
        raise ModelError(f"{path}: tensor rope_freqs.weight must hold finite numbers above 0")
    return tuple(factors.tolist())


def _canonical_tensors(named: dict[str, Tensor], config: ModelConfig, path: Path) -> dict[str, Tensor]:
    """The tensors under their canonical names, rows in canonical order. Messages have the names in the file."""
    tensors: dict[str, Tensor] = {}
    left = set(named)
    head = () if config.tie_word_embeddings else ((HEAD, (config.vocab_size, config.hidden_size)),)
    for name, shape in chain(expected_tensors(config), head):
        stored_name = gguf_name(name)
        _check_tensor(named, stored_name, shape, path)
        left.discard(stored_name)
        tensors[name] = _canonical(named[stored_name], name, config)
    if left:
        raise ModelError(
            f"{path}: tensor {shown(min(left))} has no place in a {config.architecture} model of this config"
        )
    return tensors


def _canonical(tensor: Tensor, name: str, config: ModelConfig) -> Tensor:
    num_heads = rotated_heads(name, config) if config.architecture == "llama" else 0
    if not num_heads:
        return replace(tensor, name=name)
    order = interleaved_order(num_heads, config.head_dim)
    if len(tensor.shape) == 2:
        return replace(tensor, name=name, row_order=order)
    # A bias is one row of numbers of one format each: small enough to be put in order at once.
    numbers = tensor.stored.reshape(len(order), tensor.format.block_bytes)[order]
    return replace(tensor, name=name, stored=numbers.reshape(1, -1))


def _gguf_text(file: GgufFile, directory: Path | None, vocab_size: int) -> TextFields:
    fields = {key: _plain(value) for key, value in file.fields.items() if key.startswith("tokenizer.")}
    tokens = fields.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or len(tokens) > vocab_size:
        found = f"{len(tokens)} tokens" if isinstance(tokens, list) else "none"
        raise ModelError(
            f"{file.path}: field tokenizer.ggml.tokens must list at most {vocab_size} tokens, as many as"
            f" token_embd.weight has rows, got {found}"
        )
    if directory is None:
        return TextFields(vocab_size=vocab_size, gguf=fields)
    template = directory / "chat_template.jinja"
    return TextFields(
        vocab_size=vocab_size,
        tokenizer_config=_object_if_exists(directory / "tokenizer_config.json"),
        generation_config=_object_if_exists(directory / "generation_config.json"),
        chat_template_jinja=read_text(template) if template.exists() else None,
        gguf=fields,
    )


def _plain(value: Value) -> object:
    return value.tolist() if isinstance(value, np.ndarray) else value
