"""The tokenizer of a Hugging Face model: tokenizer.json, with the names that tokenizer_config.json gives."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import tokenizers

from tlserve.errors import ModelError
from tlserve.text.spelling import Spelling
from tlserve.text.subword_tokenizer import SubwordTokenizer, TokenizerFault, Vocabulary, check_control_tokens
from tlserve.text.tokenizer_checks import fault_of, parts

# Normalizers that keep all of a text; Replace does when it spells spaces as SentencePiece does.
_KEEPING_NORMALIZERS = {"Prepend", "NFC", "ByteLevel"}
_SENTENCEPIECE_DECODERS = {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}
_SAMPLE = "A b, 1\n\té 漢 🗼 " * 3  # every tokenizer can encode it


def from_tokenizer_json(
    data: bytes,
    tokenizer_config: Mapping[str, object] | None = None,
    *,
    directory: str = ".",
    eos_ids: frozenset[int] = frozenset(),
) -> SubwordTokenizer:
    """The tokenizer that tokenizer.json (`data`) describes, its BOS and EOS as tokenizer_config.json names them.

    `eos_ids` are added to that EOS. Raises ModelError naming the file in `directory` and the field.
    """
    file = f"{directory}/tokenizer.json"
    description = _decode(data, file)
    backend = _build(data, file)
    added = backend.get_added_tokens_decoder().values()
    fault = check_control_tokens(token.content for token in added if token.special)
    if fault:
        raise ModelError(f"{file}: added_tokens: {fault}")
    config = tokenizer_config or {}
    config_file = f"{directory}/tokenizer_config.json"
    bos = _named_token(config, "bos_token", backend, config_file)
    eos = _named_token(config, "eos_token", backend, config_file)
    eos_id = backend.token_to_id(eos) if eos else None
    vocabulary = Vocabulary(
        size=1 + max(backend.get_vocab(with_added_tokens=True).values(), default=-1),
        spelling=_spelling(description, file),
        bos_id=backend.token_to_id(bos) if bos else None,
        eos_ids=eos_ids if eos_id is None else eos_ids | {eos_id},
        eos_token=eos,
        strips_first_space=_strips_first_space(description),
        keeps_all_text=_keeps_all_text(description),
        composes="NFC" in _types(description.get("normalizer")),
    )
    if vocabulary.size == 0:
        raise ModelError(f"{file}: model.vocab is empty")
    try:
        tokenizer = SubwordTokenizer(backend, vocabulary)
        ids = tokenizer.encode(_SAMPLE, add_special_tokens=True)
    except TokenizerFault as error:
        raise ModelError(f"{file}: cannot be used: {error}") from None
    if max(ids, default=0) >= vocabulary.size:
        raise ModelError(f"{file}: cannot be used: it gives token {max(ids)}, past its vocabulary")
    return tokenizer


def _decode(data: bytes, file: str) -> dict[str, object]:
    try:
        description = msgspec.json.decode(data, type=dict[str, object])
    except (msgspec.DecodeError, RecursionError) as error:
        raise ModelError(f"{file}: is not a JSON object: {error}") from None
    if fault := fault_of(description):
        raise ModelError(f"{file}: {fault}")
    return description


def _build(data: bytes, file: str) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_buffer(data)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of the library is no Exception
        raise ModelError(f"{file}: cannot be used: {str(error)[:200]}") from None


def _named_token(config: Mapping[str, object], key: str, backend: tokenizers.Tokenizer, file: str) -> str:
    """The token that a configuration names, as a string or as an object with its content; "" for none."""
    value = config.get(key)
    if isinstance(value, Mapping):
        value = value.get("content")
    if value is None or value == "":
        return ""
    if not isinstance(value, str):
        raise ModelError(f"{file}: {key} must be a token, got {str(value)[:80]!r}")
    if backend.token_to_id(value) is None:
        raise ModelError(f"{file}: {key} {value[:80]!r} is not in the vocabulary")
    return value


def _types(component: object) -> set[object]:
    return {part.get("type") for part in parts(component)} - {"Sequence"}


def _spelling(description: Mapping[str, object], file: str) -> Spelling:
    """How the vocabulary spells bytes, by what the decoder undoes."""
    decoders = _types(description.get("decoder"))
    if decoders == {"ByteLevel"}:
        return Spelling.BYTE_LEVEL
    if decoders <= {"Fuse"}:
        return Spelling.PLAIN
    if decoders <= _SENTENCEPIECE_DECODERS:
        return Spelling.METASPACE
    unknown = min(map(str, decoders - _SENTENCEPIECE_DECODERS))
    raise ModelError(f"{file}: decoder {unknown!r} is not supported")


def _strips_first_space(description: Mapping[str, object]) -> bool:
    """Whether decoding takes away the space that encoding puts before a text."""
    for part in parts(description.get("decoder")):
        if part.get("type") == "Strip":
            return bool(part.get("start"))
        if part.get("type") == "Metaspace":
            return part.get("prepend_scheme", "always") != "never" and part.get("add_prefix_space") is not False
    return False


def _keeps_all_text(description: Mapping[str, object]) -> bool:
    """Whether every byte of a text, once composed, comes back from its ids; then long texts can be refused early."""
    for part in parts(description.get("normalizer")):
        spells_spaces = part.get("pattern") == {"String": " "} and part.get("content") == "▁"
        if part.get("type") not in {*_KEEPING_NORMALIZERS, "Sequence"} and not spells_spaces:
            return False
    added = description.get("added_tokens")
    for token in added if isinstance(added, list) else ():
        if isinstance(token, dict) and (token.get("lstrip") or token.get("rstrip")):
            return False
    model = description["model"]
    is_byte_level = "ByteLevel" in _types(description.get("decoder"))
    return isinstance(model, dict) and (is_byte_level or model.get("byte_fallback") is True)
