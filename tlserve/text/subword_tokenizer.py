"""A tokenizer over the `tokenizers` library, whatever file described it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import tokenizers

from tlserve.text.alternatives import longest_of
from tlserve.text.limits import check_token_limit, min_tokens, most_per_token
from tlserve.text.spelling import Spelling

_ONLY_AT_START = '"prepend_scheme":"first"'

# A control token is looked for in every message, whole and in part.
_MAX_CONTROL_LENGTH = 128
_MAX_CONTROL_LETTERS = 1 << 19


class TokenizerFault(Exception):
    """The library failed on a text. Does not say more: what the library says may quote the text."""


@dataclass(frozen=True)
class Vocabulary:
    """What the library does not say of a tokenizer."""

    size: int  # ids are below this
    spelling: Spelling
    bos_id: int | None
    eos_ids: frozenset[int]
    eos_token: str
    strips_first_space: bool  # `encode` puts a space before the text, so `decode` takes it away
    keeps_all_text: bool  # every byte of a text comes back from its ids, but for the effect of composing
    composes: bool = False  # characters are composed first (NFC)


class SubwordTokenizer:
    """Implements Tokenizer.

    `decode` takes away the space that `encode` put before a text, at the very beginning and nowhere else, so the bytes
    of generated tokens are exactly what they add to the decoded prompt. Encoding raises TokenizerFault where the
    library fails, which hostile files can bring about.
    """

    def __init__(self, backend: tokenizers.Tokenizer, vocabulary: Vocabulary) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._vocabulary = vocabulary
        added = backend.get_added_tokens_decoder()
        self._added = {token_id: token.content for token_id, token in added.items()}
        self._control = {token.content: token for token in added.values() if token.special}
        self._control_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._control_pattern = longest_of(self._control)
        self.special_tokens = frozenset(self._control)
        self.vocab_size = vocabulary.size
        self.bos_id = vocabulary.bos_id
        self.bos_token = "" if self.bos_id is None else backend.id_to_token(self.bos_id) or ""
        self.eos_ids = vocabulary.eos_ids
        self.eos_token = vocabulary.eos_token
        self.adds_bos = self.bos_id is not None and _ids(backend, "", add_special_tokens=True)[:1] == [self.bos_id]

    def encode(
        self, text: str, *, add_special_tokens: bool, parse_special: bool = True, limit: int | None = None
    ) -> list[int]:
        self._check_limit(text, limit)
        backend = self._backend if parse_special else self._plain_backend
        return _ids(backend, text, add_special_tokens=add_special_tokens)

    def encode_guarded(self, text: str, plain: Mapping[str, str], *, limit: int | None = None) -> list[int]:
        self._check_limit(text, limit)
        restored = {ord(char): spelling for char, spelling in plain.items()}
        ids: list[int] = []
        for stretch, control in self._cut(text):
            if stretch:
                backend = self._inner_backend if ids else self._plain_backend
                ids += _ids(backend, stretch.translate(restored))
            if control is not None:
                ids.append(self._control_id(control))
        return ids

    def token_bytes(self, token_id: int) -> bytes:
        if token_id in self._control_ids:
            return b""
        return self._spelled_bytes(token_id)

    def token_text(self, token_id: int) -> str:
        return self._spelled_bytes(token_id).decode("utf-8", "replace")

    def decode(self, ids: Sequence[int]) -> str:
        data = b"".join(map(self._spelled_bytes, ids))
        if self._vocabulary.strips_first_space and ids and ids[0] not in self._control_ids:
            data = data.removeprefix(b" ")
        return data.decode("utf-8", "replace")

    def _control_id(self, control: str) -> int:
        token_id = self._backend.token_to_id(control)
        assert token_id is not None, control
        return token_id

    def _cut(self, text: str) -> Iterator[tuple[str, str | None]]:
        """The stretches between control tokens, each with the token that ends it; None ends the text."""
        start = 0
        for match in self._control_pattern.finditer(text):
            token = self._control[match[0]]
            stretch = text[start : match.start()]
            yield stretch.rstrip() if token.lstrip else stretch, match[0]
            start = match.end()
            if token.rstrip:
                while start < len(text) and text[start].isspace():
                    start += 1
        yield text[start:], None

    @cached_property
    def _plain_backend(self) -> tokenizers.Tokenizer:
        """The same tokenizer with control tokens taken as text: the library keeps that choice in the tokenizer."""
        return self._plain_copy(self._backend.to_str())

    @cached_property
    def _inner_backend(self) -> tokenizers.Tokenizer:
        """For a stretch inside a text: some tokenizers put a space before the beginning of a text and only there."""
        description = self._backend.to_str()
        if _ONLY_AT_START not in description:
            return self._plain_backend
        return self._plain_copy(description.replace(_ONLY_AT_START, '"prepend_scheme":"never"'))

    @staticmethod
    def _plain_copy(description: str) -> tokenizers.Tokenizer:
        copy = tokenizers.Tokenizer.from_str(description)
        copy.encode_special_tokens = True
        return copy

    def _check_limit(self, text: str, limit: int | None) -> None:
        if limit is not None and len(text) > limit and self._vocabulary.keeps_all_text:
            check_token_limit(min_tokens(text.encode(), self._longest_runs, composes=self._vocabulary.composes), limit)

    @cached_property
    def _longest_runs(self) -> list[int]:
        return most_per_token(map(self._spelled_bytes, range(self.vocab_size)))

    def _spelled_bytes(self, token_id: int) -> bytes:
        added = self._added.get(token_id)
        if added is not None:
            # Added tokens are spelled as they are; SentencePiece's user-defined ones still mark their spaces.
            is_marked = self._vocabulary.spelling is Spelling.METASPACE and token_id not in self._control_ids
            return Spelling.METASPACE.to_bytes(added) if is_marked else added.encode()
        token = self._backend.id_to_token(token_id) if token_id >= 0 else None
        return b"" if token is None else self._vocabulary.spelling.to_bytes(token)


def _ids(backend: tokenizers.Tokenizer, text: str, *, add_special_tokens: bool = False) -> list[int]:
    try:
        # A batch of one: only the batch forms give the interpreter lock up while they work.
        (encoding,) = backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of the library is no Exception, and would end the server
        raise TokenizerFault(f"the library fails on a text with {type(error).__name__}") from None
    ids: list[int] = encoding.ids
    return ids


def check_control_tokens(spellings: Iterable[str]) -> str | None:
    """What is wrong with a model's control tokens, if anything."""
    lengths = [len(spelling) for spelling in spellings]
    if max(lengths, default=0) > _MAX_CONTROL_LENGTH or sum(lengths) > _MAX_CONTROL_LETTERS:
        return f"control tokens have more than {_MAX_CONTROL_LENGTH} characters, or {_MAX_CONTROL_LETTERS} together"
    return None
