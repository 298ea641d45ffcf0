"""Every piece of code in README and docs is run, or stands in a table here that says why not."""

from __future__ import annotations

import inspect
import io
import re
import shutil
import subprocess
import tomllib
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.examples import MODEL, TINY, tiny_server
from tests.snippets import (
    DOCS,
    ROOT,
    Snippet,
    commands,
    shell_lines,
    snippets,
    without_variables,
)
from tlserve import ServeConfig, ServerHandle
from tlserve.__main__ import main
from tlserve.cli.commands import COMMANDS, command
from tlserve.pytest_plugin import TlserveServer

# Commands of ours whose line is only parsed, and where they are run.
RUN_ELSEWHERE = {
    "serve": "tests/test_command.py",
    "compile": "tests/cli/test_compile.py",
    "conform": "tests/cli/test_conform.py",
}
# Programs that are not run here, and why.
NOT_RUN = {
    "make": "its targets are compared with the Makefile",
    "pip": "installs",
    "mkdir": "makes directories of the reader's",
    "python3": "makes an environment to install into",
    ".": "activates that environment",
    "pytest": "runs a test of the reader's; tests/test_pytest_plugin.py does",
    "docker": "not there",
    "cat": "of a file that the reader has",
}
DEPLOY = DOCS / "deploy" / "README.md"  # its commands are the matter of tests/deploy
PLUGIN = ROOT / "README.md"  # its tests are run by tests/test_pytest_plugin.py
COMMAND_LIKE = re.compile(r"^(\$ |make |curl |pip |trio-tlserve |import |from \w+ import )", re.MULTILINE)

PRINTS = re.compile(r"^ *print\(.*\)  # (.+)$", re.MULTILINE)  # a line, and what it says that it prints


@pytest.fixture(scope="module")
def server() -> Iterator[ServerHandle]:
    with tiny_server() as server:
        yield server


@pytest.fixture(scope="module")
def here(server: ServerHandle) -> Callable[[str], str]:
    """Turns the addresses and paths that a page names into those of this test."""
    api, health = (f"{host}:{port}" for host, port in (server.http_addr, server.health_addr))

    def replace(text: str) -> str:
        text = re.sub(r"(localhost|127\.0\.0\.1):800[01]|proxy:8080", api, text)
        text = re.sub(r"(localhost|127\.0\.0\.1):9464", health, text)
        return re.sub(r"path/to/[\w./-]+", str(TINY), text)

    return replace


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with the files that the commands name."""
    monkeypatch.chdir(tmp_path)
    ports = 'http_listen = "127.0.0.1:0"\nhealth_listen = "127.0.0.1:0"'
    (tmp_path / "runtime.toml").write_text(f'[engine]\nmodel_dir = "{TINY}"\n{ports}\n')
    (tmp_path / "text.txt").write_text("The same bytes every time. " * 60)
    return tmp_path


def by_page(*languages: str) -> pytest.MarkDecorator:
    """A test for each page, with its snippets in their order."""
    pages: dict[Path, list[Snippet]] = {}
    for snippet in snippets(*languages):
        pages.setdefault(snippet.page, []).append(snippet)
    names = [str(page.relative_to(ROOT)) for page in pages]
    return pytest.mark.parametrize("blocks", list(pages.values()), ids=names)


def one_by_one(*languages: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("block", snippets(*languages), ids=lambda block: block.where)


def test_each_block_has_a_language_that_is_run_here() -> None:
    """A block without one holds nothing that looks like a command or a program."""
    assert {block.language for block in snippets()} <= {"", "python", "console", "toml", "yaml", "json"}
    assert [block.where for block in snippets("") if COMMAND_LIKE.search(block.text)] == []


@by_page("python")
def test_python(blocks: list[Snippet], server: ServerHandle, here: Callable[[str], str], desk: Path) -> None:
    """The blocks of a page are one program; functions named as tests are called as pytest would.

    What a line says that it prints is printed; ``...`` in it stands for anything.
    """
    host, port = server.health_addr
    fixture = TlserveServer(server.base_url, f"http://{host}:{port}", MODEL)
    program: dict[str, Any] = {"__name__": "snippet"}
    for block in blocks:
        if block.page == PLUGIN and "def test_" in block.text:
            continue
        with redirect_stdout(io.StringIO()) as printed:
            exec(compile(here(block.text), block.where, "exec"), program)
        for line in PRINTS.findall(block.text):
            said = re.escape(line).replace(re.escape("..."), ".*")
            assert re.search(f"^{said}$", printed.getvalue(), re.MULTILINE), (block.where, line, printed.getvalue())
        for name in [name for name in program if name.startswith("test_")]:
            test = program.pop(name)
            test(*[fixture for parameter in inspect.signature(test).parameters if parameter == "tlserve_server"])


@by_page("console")
def test_lines_of_a_console(
    blocks: list[Snippet],
    server: ServerHandle,
    here: Callable[[str], str],
    desk: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ours are run in this process, where that is no matter of other tests; what a page exports holds for its rest."""
    monkeypatch.setattr("tlserve.cli.chat.DEFAULT_URL", server.base_url)
    for line in (line for block in blocks if block.page != DEPLOY for line in shell_lines(block.text)):
        for words in commands(here(line)):
            variables, words = without_variables(words)
            if not words:
                for name, value in variables.items():
                    monkeypatch.setenv(name, value)
            elif Path(words[0]).name == "trio-tlserve":
                monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"Name a colour.")))
                try_ours(words[1:])
            else:
                assert words[0] in NOT_RUN or words[0] == "curl", line


def try_ours(arguments: list[str]) -> None:
    name = arguments[0] if arguments[0] in COMMANDS else "serve"
    rest = arguments[1:] if arguments[0] in COMMANDS else arguments
    if name in RUN_ELSEWHERE:
        command(name).parser().parse_args(rest)  # ends the program where it is wrong
    else:
        assert main(arguments) == 0


@pytest.mark.parametrize("name", RUN_ELSEWHERE)
def test_commands_that_are_only_parsed_have_tests_of_their_own(name: str) -> None:
    assert (ROOT / RUN_ELSEWHERE[name]).exists()


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
@by_page("console")
def test_curl(blocks: list[Snippet], here: Callable[[str], str], desk: Path) -> None:
    """The answer has the status that the line's comment names, or 200."""
    for line in (line for block in blocks for line in shell_lines(block.text) if line.startswith("curl ")):
        ((_, *arguments),) = commands(here(line))
        called = ["curl", "--silent", "--max-time", "60", "--output", "answer", "--write-out", "%{http_code}"]
        done = subprocess.run([*called, *arguments], capture_output=True, text=True, check=True)
        expected = re.search(r"# (\d{3})$", line)
        assert (line, done.stdout) == (line, expected[1] if expected else "200")
        assert (desk / "answer").stat().st_size > 0


@one_by_one("toml")
def test_toml(block: Snippet, desk: Path) -> None:
    """Documents with the table of the server are configurations of it."""
    assert "engine" not in tomllib.loads(block.text) or ServeConfig.from_toml(block.text, {}, directory=desk)


@one_by_one("yaml", "json")
def test_yaml_and_json(block: Snippet) -> None:
    assert isinstance(yaml.safe_load(block.text), dict | list)  # JSON is YAML
