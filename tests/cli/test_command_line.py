"""What all commands have in common: help that says something, documentation, one name for one thing."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest

from tests.cli.options import PAGE, documented_commands, page_text
from tlserve.__main__ import main
from tlserve.cli.commands import COMMANDS, GROUPS, command

PARSERS = {name: command(name).parser() for name in COMMANDS}
OPTIONS = [(name, action) for name, parser in PARSERS.items() for action in parser._actions]


# Writes its document into a file, beside the table that it prints.
JSON_FILE = ("conform", "--json")


def kind(action: argparse.Action) -> tuple[object, ...]:
    """What a value of an option looks like: none, one of some, or what its metavar stands for."""
    return (action.nargs == 0, action.metavar, tuple(action.choices or ()))


def test_help_names_every_command_in_its_group_with_lines_to_paste(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert [name for name in COMMANDS if not re.search(rf"^  {name} +{re.escape(COMMANDS[name])}$", text, re.M)] == []
    assert [group for group in GROUPS if f"\n{group}:\n" not in text] == []
    assert "trio-tlserve check runtime.toml" in text
    assert "docs/command-line.md" in text
    assert max(map(len, text.splitlines())) <= 100


@pytest.mark.parametrize(("word", "meant"), [("chekc", "check"), ("completions", "completion"), ("bnech", "bench")])
def test_a_misspelled_command_is_named_with_the_one_that_was_meant(
    word: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([word, "runtime.toml"]) == 2
    expected = f"trio-tlserve: {word} is neither a command nor a file; did you mean {meant}?\n"
    assert capsys.readouterr() == ("", expected)


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_describes_itself_with_examples(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([name, "--help"])
    text = capsys.readouterr().out
    assert caught.value.code == 0
    assert text.startswith("usage: trio-tlserve")
    description = text.split("\n\n")[1]
    assert len(description) > 40
    examples = text.split("examples:\n")[1].splitlines()
    assert [line for line in examples if line and "trio-tlserve" not in line] == []


@pytest.mark.parametrize(("name", "action"), OPTIONS, ids=lambda item: item if isinstance(item, str) else item.dest)
def test_each_option_says_what_it_is(name: str, action: argparse.Action) -> None:
    assert action.help
    if action.option_strings and action.nargs != 0:
        assert action.metavar or action.choices, "its value has no name"


WITH_VALUE = [(name, action) for name, action in OPTIONS if action.option_strings and action.nargs != 0]


def example(action: argparse.Action) -> str:
    """A value that the option takes."""
    return str(next(iter(action.choices))) if action.choices else "8"


def needed_beside(action: argparse.Action, parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """What must be given too: what is required, and the first of those of which one is."""
    groups = [group._group_actions for group in parser._mutually_exclusive_groups if group.required]
    first = [members[0] for members in groups if action not in members]
    return [other for other in parser._actions if other.required and other is not action] + first


@pytest.mark.parametrize(("name", "action"), WITH_VALUE, ids=lambda item: item if isinstance(item, str) else item.dest)
def test_a_value_may_follow_its_option_or_an_equals_sign(name: str, action: argparse.Action) -> None:
    others = needed_beside(action, PARSERS[name])
    needed = [word for other in others for word in [*other.option_strings[:1], example(other)]]
    for option in action.option_strings:
        apart, joined = ([*needed, *form] for form in ([option, example(action)], [f"{option}={example(action)}"]))
        parsed = PARSERS[name].parse_args(apart)
        assert getattr(parsed, action.dest) is not None
        assert PARSERS[name].parse_args(joined) == parsed


NUMBERS = [(name, action) for name, action in WITH_VALUE if action.type not in (None, Path) and action.metavar != "KEY"]


@pytest.mark.parametrize(("name", "action"), NUMBERS, ids=lambda item: item if isinstance(item, str) else item.dest)
def test_what_is_no_number_is_refused_in_the_words_of_the_rule(
    name: str, action: argparse.Action, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        PARSERS[name].parse_args([action.option_strings[0], "x"])
    assert re.search(r": must be an? .*(integer|number).*, got 'x'$", capsys.readouterr().err, re.M)


def test_an_option_has_the_same_kind_of_value_in_every_command() -> None:
    kinds: dict[str, dict[tuple[object, ...], list[str]]] = {}
    for name, action in OPTIONS:
        for option in action.option_strings:
            if (name, option) == JSON_FILE:
                continue
            kinds.setdefault(option, {}).setdefault(kind(action), []).append(name)
    assert {option: found for option, found in kinds.items() if len(found) > 1} == {}


def test_every_option_is_documented_as_the_parsers_have_it() -> None:
    page = PAGE.read_text()
    assert sorted(documented_commands(page)) == sorted(COMMANDS)
    assert page == page_text(page), "run make generate"
