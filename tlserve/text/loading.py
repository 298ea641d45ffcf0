"""From what a model's files say to a tokenizer and a chat template."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from tlserve.errors import ModelError
from tlserve.text.byte_tokenizer import NUM_BYTES, byte_tokenizer
from tlserve.text.chat import ChatEncoder
from tlserve.text.gguf_tokenizer import from_gguf
from tlserve.text.template import DEFAULT_TEMPLATE, Template, TemplateError
from tlserve.text.tokenizer import Tokenizer
from tlserve.text.tokenizer_json import from_tokenizer_json


class TextFields(Protocol):
    """What the files of a model say about its text, as plain values; None or empty where there is no such file."""

    @property
    def vocab_size(self) -> int:
        """Of the model; a tokenizer may have fewer tokens."""

    @property
    def tokenizer_json(self) -> bytes | None: ...

    @property
    def tokenizer_config(self) -> Mapping[str, object]: ...

    @property
    def generation_config(self) -> Mapping[str, object]: ...

    @property
    def chat_template_jinja(self) -> str | None: ...

    @property
    def gguf(self) -> Mapping[str, object]:
        """The `tokenizer.*` fields."""


def load_text(text: TextFields, path: Path) -> ChatEncoder:
    """The tokenizer and the chat template of the model at `path`, checked.

    Raises ModelError naming the file and the field.
    """
    tokenizer = _tokenizer(text, path)
    if tokenizer.vocab_size > text.vocab_size:
        raise ModelError(f"{path}: the tokenizer has {tokenizer.vocab_size} tokens, the model only {text.vocab_size}")
    return ChatEncoder(_template(text, path), tokenizer)


def _tokenizer(text: TextFields, path: Path) -> Tokenizer:
    eos_ids = _eos_ids(text, path)
    if text.gguf:
        return from_gguf(text.gguf, file=str(path), eos_ids=eos_ids)
    if text.tokenizer_json is not None:
        return from_tokenizer_json(text.tokenizer_json, text.tokenizer_config, directory=str(path), eos_ids=eos_ids)
    if text.vocab_size < NUM_BYTES:
        raise ModelError(f"{path}: tokenizer.json is missing, and {text.vocab_size} ids are too few for bytes")
    return byte_tokenizer(eos_ids)


def _eos_ids(text: TextFields, path: Path) -> frozenset[int]:
    """The ids that generation_config.json says end a generation."""
    value = text.generation_config.get("eos_token_id")
    ids = [] if value is None else value if isinstance(value, list) else [value]
    for token_id in ids:
        if type(token_id) is not int or not 0 <= token_id < text.vocab_size:
            raise ModelError(
                f"{path}/generation_config.json: eos_token_id must be below {text.vocab_size}, got {str(token_id)[:80]}"
            )
    return frozenset(ids)


def _template(text: TextFields, path: Path) -> Template:
    """The first template that there is, in the order of the contract."""
    sources = (
        (path / "generation_config.json", "chat_template", text.generation_config.get("chat_template")),
        (path / "tokenizer_config.json", "chat_template", _named_template(text.tokenizer_config.get("chat_template"))),
        (path / "chat_template.jinja", "the template", text.chat_template_jinja),
        (path, "tokenizer.chat_template", text.gguf.get("tokenizer.chat_template")),
    )
    for file, field, source in sources:
        if source is None:
            continue
        if not isinstance(source, str):
            raise ModelError(f"{file}: {field} must be a string, got {str(source)[:80]}")
        try:
            return Template.parse(source)
        except TemplateError as error:
            raise ModelError(f"{file}: {field}: {error}") from None
    return Template.parse(DEFAULT_TEMPLATE)


def _named_template(value: object) -> object:
    """tokenizer_config.json may list templates by name; the one for plain chats is called "default"."""
    if isinstance(value, list):
        for entry in value:
            if isinstance(entry, dict) and entry.get("name") == "default":
                return entry.get("template")
    return value
