"""The tokenizer inside a GGUF file, built from its `tokenizer.*` fields.

The reference is llama.cpp: its pre-tokenizer expressions, its token types, its defaults for what a file leaves out.
Two models of tokenizer are known: `gpt2`, byte-level BPE with the pre-tokenizers of PRE_TOKENIZERS, and `llama`,
SentencePiece's BPE whose merges follow from the scores of the tokens.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from tlserve.errors import ModelError
from tlserve.text.spelling import Spelling
from tlserve.text.subword_tokenizer import SubwordTokenizer, Vocabulary, check_control_tokens

_LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_WORDS = _LLAMA3_WORDS.replace(r"\p{N}{1,3}", r"\p{N}")


# What llama.cpp takes for granted of a SentencePiece model.
_SENTENCEPIECE_IDS = {"unknown": 0, "bos": 1, "eos": 2}
# Every way to cut a token in two is looked at. SentencePiece makes tokens of up to 16 characters unless told otherwise.
_MAX_TOKEN_LENGTH = 256
_MAX_LETTERS = 8 << 20


class TokenType(enum.IntEnum):
    """Values of tokenizer.ggml.token_type."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class _PreTokenizer:
    """How a `gpt2` tokenizer cuts text into words, and what llama.cpp takes for granted with it."""

    words: str | None  # None is GPT-2's own expression, which the library has built in
    splits_digits: bool = False
    ignores_merges: bool = False  # a word that is a token as a whole is that token
    adds_bos: bool = False

    def build(self) -> pre_tokenizers.PreTokenizer:
        steps: list[pre_tokenizers.PreTokenizer] = []
        if self.splits_digits:
            steps.append(pre_tokenizers.Digits(individual_digits=True))
        if self.words is not None:
            steps.append(pre_tokenizers.Split(Regex(self.words), behavior="isolated"))
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=self.words is None))
        return pre_tokenizers.Sequence(steps)


PRE_TOKENIZERS = {
    "gpt-2": _PreTokenizer(words=None),
    "llama-bpe": _PreTokenizer(words=_LLAMA3_WORDS, ignores_merges=True, adds_bos=True),
    "qwen2": _PreTokenizer(words=_QWEN2_WORDS),
    "smollm": _PreTokenizer(words=None, splits_digits=True),
}


def from_gguf(
    fields: Mapping[str, object], *, file: str = "the GGUF file", eos_ids: frozenset[int] = frozenset()
) -> SubwordTokenizer:
    """The tokenizer that `fields` (keys `tokenizer.*`, plain values) describe.

    `eos_ids` are added to the end-of-text ids that the fields name. Raises ModelError naming `file` and the field.
    """
    try:
        return _Builder(fields, file).build(eos_ids)
    except ModelError:
        raise
    except Exception as error:  # from the library, which checks what it is given
        raise ModelError(f"{file}: tokenizer.ggml: cannot be used: {_shown(str(error))}") from error


class _Builder:
    def __init__(self, fields: Mapping[str, object], file: str) -> None:
        self._fields = fields
        self._file = file
        self._model = self._text("tokenizer.ggml.model")
        self._tokens: list[str] = self._list("tokenizer.ggml.tokens", str)
        if not self._tokens:
            raise self._error("tokenizer.ggml.tokens", "is empty")
        self._ids = {token: token_id for token_id, token in reversed(list(enumerate(self._tokens)))}
        self._types: list[int] = self._list("tokenizer.ggml.token_type", int, optional=True)
        if not self._types:
            self._types = [TokenType.NORMAL] * len(self._tokens)
        if len(self._types) != len(self._tokens):
            raise self._error(
                "tokenizer.ggml.token_type", f"has {len(self._types)} values for {len(self._tokens)} tokens"
            )

    def build(self, eos_ids: frozenset[int]) -> SubwordTokenizer:
        if self._model == "gpt2":
            backend, adds_bos = self._byte_level_bpe()
            spelling, has_prefix = Spelling.BYTE_LEVEL, False
        elif self._model == "llama":
            backend, has_prefix = self._sentencepiece_bpe()
            spelling, adds_bos = Spelling.METASPACE, True
        else:
            raise self._error("tokenizer.ggml.model", f"{self._model!r} is not supported, only 'gpt2' and 'llama' are")
        self._add_tokens(backend)
        self._add_ends(backend, adds_bos=adds_bos)
        eos_id = self._id("eos")
        named = {token_id for name in ("eos", "eot", "eom") if (token_id := self._id(name)) is not None}
        vocabulary = Vocabulary(
            size=len(self._tokens),
            spelling=spelling,
            bos_id=self._id("bos"),
            eos_ids=eos_ids | named,
            eos_token="" if eos_id is None else self._tokens[eos_id],
            strips_first_space=has_prefix,
            keeps_all_text=spelling is Spelling.BYTE_LEVEL
            or all(f"<0x{byte:02X}>" in self._ids for byte in range(256)),
        )
        return SubwordTokenizer(backend, vocabulary)

    def _byte_level_bpe(self) -> tuple[Tokenizer, bool]:
        name = self._text("tokenizer.ggml.pre")
        pre = PRE_TOKENIZERS.get(name)
        if pre is None:
            known = ", ".join(map(repr, PRE_TOKENIZERS))
            raise self._error("tokenizer.ggml.pre", f"{name!r} is not supported, only {known} are")
        merges: list[tuple[str, ...]] = []
        for merge in self._list("tokenizer.ggml.merges", str):
            pair = tuple(merge.split(" "))
            if len(pair) != 2 or not all(part in self._ids for part in (*pair, "".join(pair))):
                raise self._error("tokenizer.ggml.merges", f"{merge[:80]!r} does not join two tokens to a third")
            merges.append(pair)
        model = models.BPE(self._ids, merges, ignore_merges=pre.ignores_merges)  # type: ignore[arg-type]
        backend = Tokenizer(model)
        backend.pre_tokenizer = pre.build()
        backend.decoder = decoders.ByteLevel()
        return backend, pre.adds_bos

    def _sentencepiece_bpe(self) -> tuple[Tokenizer, bool]:
        unknown = self._id("unknown")
        backend = Tokenizer(
            models.BPE(
                self._ids,
                self._merges_by_score(),
                unk_token=None if unknown is None else self._tokens[unknown],
                fuse_unk=True,
                byte_fallback=True,
            )
        )
        has_prefix = self._flag("tokenizer.ggml.add_space_prefix", default=True)
        spaces = normalizers.Replace(" ", "▁")
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if has_prefix else spaces
        return backend, has_prefix

    def _merges_by_score(self) -> list[tuple[str, str]]:
        """Every way to join two tokens to a third, the best first.

        SentencePiece joins the pair whose joint token has the highest score. A control token is never joined from
        letters; llama.cpp can do that.
        """
        scores: list[float] = self._list("tokenizer.ggml.scores", float)
        if len(scores) != len(self._tokens):
            raise self._error("tokenizer.ggml.scores", f"has {len(scores)} values for {len(self._tokens)} tokens")
        if any(map(math.isnan, scores)):
            raise self._error("tokenizer.ggml.scores", "has a value that is no number")
        if sum(map(len, self._tokens)) > _MAX_LETTERS or max(map(len, self._tokens)) > _MAX_TOKEN_LENGTH:
            raise self._error(
                "tokenizer.ggml.tokens", f"has a token longer than {_MAX_TOKEN_LENGTH} characters or too many"
            )
        joinable = {
            token: scores[token_id]
            for token, token_id in self._ids.items()
            if self._types[token_id] in (TokenType.NORMAL, TokenType.USER_DEFINED)
        }
        merges = [
            (-score, -size, token[:size], token[size:])
            for token, score in joinable.items()
            for size in range(1, len(token))
            if token[:size] in joinable and token[size:] in joinable
        ]
        merges.sort(key=lambda merge: merge[:2])
        return [merge[2:] for merge in merges]

    def _add_tokens(self, backend: Tokenizer) -> None:
        """Tokens that are matched in the text before anything else."""
        fault = check_control_tokens(
            token
            for token, token_type in zip(self._tokens, self._types, strict=True)
            if token_type in (TokenType.CONTROL, TokenType.UNKNOWN)
        )
        if fault:
            raise self._error("tokenizer.ggml.tokens", fault)
        for added_types, is_special in (
            ((TokenType.CONTROL, TokenType.UNKNOWN), True),
            ((TokenType.USER_DEFINED,), False),
        ):
            added = [
                AddedToken(token, special=is_special, normalized=False)
                for token, token_type in zip(self._tokens, self._types, strict=True)
                if token_type in added_types and token
            ]
            (backend.add_special_tokens if is_special else backend.add_tokens)(added)

    def _add_ends(self, backend: Tokenizer, *, adds_bos: bool) -> None:
        """BOS before a text and EOS behind it, where the model asks for them."""
        bos_id = self._id("bos") if self._flag("tokenizer.ggml.add_bos_token", default=adds_bos) else None
        eos_id = self._id("eos") if self._flag("tokenizer.ggml.add_eos_token", default=False) else None
        before, behind = "BOS " if bos_id is not None else "", " EOS" if eos_id is not None else ""
        if before or behind:
            ends = {"BOS": bos_id, "EOS": eos_id}
            backend.post_processor = processors.TemplateProcessing(
                single=f"{before}$A{behind}",
                special_tokens=[
                    {"id": name, "ids": [token_id], "tokens": [self._tokens[token_id]]}
                    for name, token_id in ends.items()
                    if token_id is not None
                ],
            )

    def _id(self, name: str) -> int | None:
        """The id under tokenizer.ggml.<name>_token_id."""
        key = f"tokenizer.ggml.{name}_token_id"
        value = self._fields.get(key)
        if value is None and self._model == "llama":
            value = _SENTENCEPIECE_IDS.get(name)
        if value is None:
            return None
        if type(value) is not int or not 0 <= value < len(self._tokens):
            raise self._error(key, f"must be one of {len(self._tokens)} ids, got {_shown(value)}")
        return value

    def _flag(self, key: str, *, default: bool) -> bool:
        value = self._fields.get(key, default)
        if not isinstance(value, bool):
            raise self._error(key, f"must be true or false, got {_shown(value)}")
        return value

    def _text(self, key: str) -> str:
        value = self._fields.get(key)
        if not isinstance(value, str):
            raise self._error(key, "is missing" if value is None else f"must be a string, got {_shown(value)}")
        return value

    def _list(self, key: str, kind: type, *, optional: bool = False) -> list[Any]:
        values = self._fields.get(key)
        if values is None and optional:
            return []
        if not isinstance(values, list) or not set(map(type, values)) <= {kind}:
            raise self._error(key, "is missing" if values is None else f"must be a list of {kind.__name__}")
        return values

    def _error(self, key: str, fault: str) -> ModelError:
        return ModelError(f"{self._file}: {key} {fault}")


def _shown(value: object) -> str:
    return repr(value)[:80]
