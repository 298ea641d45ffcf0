"""A conversation as token ids: only the template's own text can become control tokens.

What a user wrote is marked before the template sees it: a spelling of a control token inside a message is replaced
by one private-use character that occurs nowhere else, and so is one character of a spelling that an end of a message
could complete together with what the template puts next to it. The template may trim, join or JSON-encode the
content as it likes. The tokenizer then cuts the text at the control tokens that are left, puts the user's own
characters back into the stretches between, and encodes those as plain text.

When nothing needs a mark, which is nearly always, the text is encoded as it is.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence

from tlserve.text.alternatives import longest_of
from tlserve.text.template import Template, TemplateRenderError
from tlserve.text.tokenizer import Tokenizer

Message = Mapping[str, object]

# Private use planes 15 and 16, without the last two code points of each, which are no characters.
_MARKS = "\U000f0000-\U000ffffd\U00100000-\U0010fffd"


class ChatEncoder:
    """A model's chat template with its tokenizer. Encoding changes nothing, so threads may share one."""

    def __init__(self, template: Template, tokenizer: Tokenizer) -> None:
        self.template = template
        self.tokenizer = tokenizer
        self._spellings = _Spellings(tokenizer.special_tokens)

    def encode(
        self, messages: Sequence[Message], tools: Sequence[Message] | None = None, *, limit: int | None = None
    ) -> list[int]:
        """Ids of the rendered conversation with the opening of the assistant's turn. Blocks; call it in a thread.

        BOS is there exactly once when the tokenizer adds it, and as often as the template says otherwise.
        Raises TemplateRenderError, and ContextLengthExceeded as `Tokenizer.encode` does for `limit`.
        """
        tokenizer = self.tokenizer
        marks = _Marks(self._spellings, [*_strings(messages), *_strings(tools), self.template.source])
        text = self.template.render_chat(
            [marks.message(message) for message in messages],
            bos=tokenizer.bos_token,
            eos=tokenizer.eos_token,
            tools=None if tools is None else [marks.message(tool) for tool in tools],
        )
        if marks.plain:
            ids = tokenizer.encode_guarded(marks.unescaped(text), marks.plain, limit=limit)
        else:
            ids = tokenizer.encode(text, add_special_tokens=False, limit=limit)
        if tokenizer.adds_bos and tokenizer.bos_id is not None and ids[:1] != [tokenizer.bos_id]:
            ids.insert(0, tokenizer.bos_id)
        return ids


class _Spellings:
    """Where text spells a control token, or could once something is put next to it."""

    def __init__(self, spellings: frozenset[str]) -> None:
        self.whole = longest_of(spellings)
        self._starts = {spelling[:size] for spelling in spellings for size in range(1, len(spelling))}
        self._ends = {spelling[size:] for spelling in spellings for size in range(1, len(spelling))}
        self._longest = max(map(len, spellings), default=0)

    def edges(self, text: str) -> Iterator[int]:
        """Places to mark so that neither end of `text`, trimmed or not, is part of a spelling across that end."""
        if text.isidentifier():  # a role or a type, which templates compare with words of their own
            return
        for end in {len(text), len(text.rstrip())}:
            for start in range(max(0, end - self._longest), end):
                if text[start:end] in self._starts:
                    yield start
                    break
        for start in {0, len(text) - len(text.lstrip())}:
            for end in range(min(len(text), start + self._longest), start, -1):
                if text[start:end] in self._ends:
                    yield end - 1
                    break


class _Marks:
    """The marks of one conversation."""

    def __init__(self, spellings: _Spellings, texts: Sequence[str]) -> None:
        self.plain: dict[str, str] = {}  # mark -> what it stands for
        self._spellings = spellings
        self._marks: dict[str, str] = {}  # the inverse
        self._unused = self._unused_characters(texts)

    def message(self, message: Message) -> dict[str, object]:
        """The message as templates expect it, marked. A field that is null is left out."""
        marked = {str(self._key(key)): self._value(value) for key, value in message.items() if value is not None}
        if marked.get("role") == "developer":
            marked["role"] = "system"
        if marked.get("role") == "assistant":
            # Beside tool calls it may be absent, and many templates add it to a string.
            marked.setdefault("content", "")
        return marked

    def unescaped(self, text: str) -> str:
        """The text with each mark as itself where a template escaped it in JSON."""
        for mark in self.plain:
            text = text.replace(json.dumps(mark).strip('"'), mark)
        return text

    def _value(self, value: object) -> object:
        if isinstance(value, str):
            return self._text(value)
        if isinstance(value, Mapping):
            return {self._key(key): self._value(part) for key, part in value.items()}
        if isinstance(value, list | tuple):
            return [self._value(part) for part in value]
        return value

    def _key(self, key: object) -> object:
        return self._whole(key) if isinstance(key, str) else key

    def _text(self, text: str) -> str:
        places = sorted(set(self._spellings.edges(text)))
        pieces, done = [], 0
        for place in places:
            pieces += [text[done:place], self._mark(text[place])]
            done = place + 1
        return self._whole("".join([*pieces, text[done:]]))

    def _whole(self, text: str) -> str:
        return self._spellings.whole.sub(lambda match: self._mark(match[0]), text)

    def _mark(self, spelling: str) -> str:
        mark = self._marks.get(spelling)
        if mark is None:
            mark = self._marks[spelling] = next(self._unused)
            self.plain[mark] = spelling
        return mark

    @staticmethod
    def _unused_characters(texts: Sequence[str]) -> Iterator[str]:
        """Private-use characters that are in none of `texts`, which are read when the first one is needed."""
        used = {char for text in texts for char in re.findall(f"[{_MARKS}]", text)}
        for code in itertools.chain(range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE)):
            if chr(code) not in used:
                yield chr(code)
        raise TemplateRenderError("the messages leave no private-use character to mark control tokens with")


def _strings(value: object) -> Iterator[str]:
    """All text in a value of JSON, names of fields included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from _strings(key)
            yield from _strings(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _strings(part)
