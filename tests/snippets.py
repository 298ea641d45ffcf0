"""Code in the documentation: where it stands, and how a reader would run it here."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.glob("*.md"), *(DOCS / "deploy").glob("*.md")])
_FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Snippet:
    """A fenced block. Without a language it is a picture or output."""

    page: Path
    line: int
    language: str
    text: str

    @property
    def where(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def snippets(*languages: str) -> list[Snippet]:
    return [snippet for page in PAGES for snippet in _of(page) if not languages or snippet.language in languages]


def _of(page: Path) -> Iterator[Snippet]:
    text = page.read_text()
    for match in _FENCE.finditer(text):
        yield Snippet(page, text.count("\n", 0, match.start()) + 1, match[1], match[2])


def shell_lines(text: str) -> list[str]:
    """What is typed after each prompt of a console block; a line that ends in a backslash goes on in the next."""
    joined = text.replace("\\\n", " ")
    return [line[2:] for line in joined.splitlines() if line.startswith(("$ ", "# "))]


def commands(line: str) -> list[list[str]]:
    """The words of each command of a pipeline, without comments and without what is redirected where."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|>")
    lexer.whitespace_split = True
    found: list[list[str]] = [[]]
    words = iter(lexer)
    for word in words:
        if word == "|":
            found.append([])
        elif word == ">":
            next(words)
        else:
            found[-1].append(word)
    return found


def without_variables(words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """The assignments before a command, or after ``export``, and the command."""
    rest = list(words[1:] if words[:1] == ["export"] else words)
    variables: dict[str, str] = {}
    while rest and (match := re.fullmatch(r"([A-Z][A-Z_0-9]*)=(.*)", rest[0])):
        variables[match[1]] = match[2]
        rest.pop(0)
    return variables, rest
