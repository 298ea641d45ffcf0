"""Each program in docs/examples does what it says; those of clients that ``make clients`` installs are in clients/."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.examples import (
    CAPITAL,
    COLOURS,
    EXAMPLES,
    ROOT,
    STORY,
    TINY,
    ask,
    run_python,
    text_and_cost,
    text_of,
    tiny_server,
)
from tlserve import ServerHandle

TESTS = [Path(__file__), *sorted((ROOT / "tests" / "clients").glob("test_*.py"))]
PAGE = ROOT / "docs" / "clients.md"
PROGRAMS = sorted(path for path in EXAMPLES.iterdir() if path.is_file())


@pytest.fixture(scope="module")
def server() -> Iterator[ServerHandle]:
    with tiny_server() as server:
        yield server


def question(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


# What holds for all of them


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.name)
def test_each_example_says_what_it_is_and_is_documented_and_run_by_a_test(path: Path) -> None:
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#!")]
    assert [line[:2] in ("# ", "//") for line in lines[:3]] == [True, True, False]
    assert f"(examples/{path.name})" in PAGE.read_text()
    assert [test.name for test in TESTS if f'"{path.name}"' in test.read_text()] != []


def test_the_documented_versions_are_those_that_are_installed() -> None:
    bounds = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["clients"]
    node = json.loads((ROOT / "tests" / "clients" / "package.json").read_text())["dependencies"]
    documented = dict(re.findall(r"^\| `([a-z-]+)`(?: \(Python\))? \| ([0-9.]+) ", PAGE.read_text(), re.MULTILINE))
    required = dict(bound.replace("-slim[openai]", "").split(">=") for bound in bounds)
    assert documented.items() <= required.items()
    assert documented.keys() >= {"openai", "httpx", "langchain-openai", "litellm", "pydantic-ai", "llm"}
    assert f"| `openai` (Node) | {node['openai'].removeprefix('>=')} |" in PAGE.read_text()


# The Python client of OpenAI


def test_openai_chat(server: ServerHandle) -> None:
    assert run_python("openai_chat.py", server) == text_and_cost(ask(server, CAPITAL))


def test_openai_stream(server: ServerHandle) -> None:
    assert run_python("openai_stream.py", server) == text_and_cost(ask(server, COLOURS))


def test_openai_async(server: ServerHandle) -> None:
    questions = [question(f"Name {what}.") for what in ("a colour", "an animal", "a city")]
    answers = [text_of(ask(server, messages, max_tokens=16)) for messages in questions]
    assert run_python("openai_async.py", server) == "".join(f"{answer}\n" for answer in answers)


def test_openai_embeddings(server: ServerHandle) -> None:
    similarities = [float(line.split()[0]) for line in run_python("openai_embeddings.py", server).splitlines()]
    assert len(similarities) == 3
    assert similarities == sorted(similarities, reverse=True)
    assert all(-1 < similarity < 1 for similarity in similarities)


def test_openai_errors(server: ServerHandle) -> None:
    lines = run_python("openai_errors.py", server).splitlines()
    assert lines[0].startswith("400 temperature ")
    assert "temperature must be a number from 0 to 2, got 3" in lines[0]
    assert lines[1:] == [
        "400 max_tokens context_length_exceeded",
        "404 model model_not_found",
        "422 n unsupported_parameter",
    ]


def test_openai_cancel(server: ServerHandle) -> None:
    printed = run_python("openai_cancel.py", server).removesuffix("\n")
    assert len(printed) >= 20
    assert text_of(ask(server, STORY, max_tokens=100)).startswith(printed)


# The server inside a program


def test_serve_in_trio(server: ServerHandle) -> None:
    printed = run_python("serve_in_trio.py", None, TINY)
    answers = [text_of(ask(server, question(f"Name {what}."), max_tokens=16)) for what in ("a colour", "an animal")]
    assert printed in ("".join(f"{answer}\n" for answer in order) for order in (answers, answers[::-1]))


def test_spawn_in_asyncio(server: ServerHandle) -> None:
    assert run_python("spawn_in_asyncio.py", None, TINY) == text_of(ask(server, COLOURS, max_tokens=16)) + "\n"


def test_spawn_in_plain_code(server: ServerHandle) -> None:
    answer = ask(server, question("Name a colour."), max_tokens=16, temperature=1, seed=7)
    assert run_python("spawn_in_plain_code.py", None, TINY) == text_of(answer) + "\n"
