"""Completion: bash itself says what it would offer; the other scripts hold every command and option."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tlserve.__main__ import main
from tlserve.cli.commands import COMMANDS, command

# Prints what is offered for the words after the script; the last one is the one under the cursor.
OFFER = 'source "$1"; shift; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _trio_tlserve; printf "%s\\n" "${COMPREPLY[@]}"'


def printed(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["completion", shell]) == 0
    return capsys.readouterr().out


@pytest.fixture
def script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    path = tmp_path / "completion.bash"
    path.write_text(printed("bash", capsys))
    return path


def offered(script: Path, *words: str) -> set[str]:
    """In a directory that has a runtime.toml and a directory with a space in its name."""
    directory = script.parent / "here"
    directory.mkdir(exist_ok=True)
    (directory / "runtime.toml").touch()
    (directory / "my models").mkdir(exist_ok=True)
    ended = subprocess.run(
        ["bash", "--norc", "-c", OFFER, "bash", str(script), "trio-tlserve", *words],
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    assert ended.stderr == ""
    return set(ended.stdout.splitlines()) - {""}


FILES = {"runtime.toml", "my models"}


def test_the_first_word_is_a_command_or_a_file(script: Path) -> None:
    assert offered(script, "") >= set(COMMANDS) | FILES
    assert offered(script, "ch") == {"check", "chat"}
    assert offered(script, "run") == {"runtime.toml"}
    assert offered(script, "--v") == {"--version"}


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_offers_all_its_options(script: Path, name: str) -> None:
    options = {option for action in command(name).parser()._actions for option in action.option_strings}
    assert offered(script, name, "-") == options


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("check", "--j"), {"--json"}),
        (("check", "r"), {"runtime.toml"}),
        (("check", "--model-dir", ""), FILES),
        (("bench", "--weights", ""), {"auto", "f32", "q8", "q4"}),
        (("bench", "--weights", "q"), {"q8", "q4"}),
        (("bench", "--weights", "q8", "--kv"), {"--kv-dtype"}),
        (("bench", ""), None),
        (("load", "--base-url", ""), set()),
        (("load", "--endpoint", "c"), {"chat", "completions"}),
        (("completion", "z"), {"zsh"}),
        (("--config", ""), FILES),
        (("--config", "my"), {"my models"}),
    ],
)
def test_words_after_the_command_are_completed(script: Path, words: tuple[str, ...], expected: set[str] | None) -> None:
    found = offered(script, *words)
    if expected is None:  # no file is an argument of it
        assert not found & FILES
    else:
        assert found == expected


def in_fish(option: str) -> str:
    """As its ``complete`` has long options, letters, and words behind one dash."""
    return f"-l {option[2:]}" if option.startswith("--") else f"-{'s' if len(option) == 2 else 'o'} {option[1:]}"


@pytest.mark.parametrize(("shell", "spelled"), [("zsh", "'{}["), ("fish", None)])
def test_the_other_scripts_have_every_command_and_option(
    shell: str, spelled: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    text = printed(shell, capsys)
    options = {
        option for name in COMMANDS for action in command(name).parser()._actions for option in action.option_strings
    }
    assert [name for name in COMMANDS if name not in text] == []
    assert [option for option in options if (spelled.format(option) if spelled else in_fish(option)) not in text] == []


def test_another_shell_is_refused_with_those_that_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["completion", "tcsh"])
    assert "bash" in capsys.readouterr().err
