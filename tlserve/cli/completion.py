"""``trio-tlserve completion bash``: a script that completes commands, options and files, made from the parsers."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from tlserve.cli.arguments import new_parser
from tlserve.cli.commands import COMMANDS, command
from tlserve.cli.completion_scripts import Option, Spec, bash, fish, zsh

DESCRIPTION = """Print a script that completes the commands, their options, the values of those that have a list, and
files. It holds no path of this machine and is to be made again after an upgrade."""
EXAMPLES = (
    "trio-tlserve completion bash > ~/.local/share/bash-completion/completions/trio-tlserve",
    "trio-tlserve completion zsh > ~/.zfunc/_trio-tlserve   # with fpath+=~/.zfunc before compinit",
    "trio-tlserve completion fish > ~/.config/fish/completions/trio-tlserve.fish",
)
# Metavars of options whose value is a file or a directory.
FILE_METAVARS = {"FILE", "PATH", "DIR", "PNG"}
SHELLS = {"bash": bash, "zsh": zsh, "fish": fish}


def main(argv: Sequence[str]) -> int:
    shell = parser().parse_args(argv).shell
    print(SHELLS[shell]([_spec(name) for name in COMMANDS]), end="")
    return 0


def parser() -> argparse.ArgumentParser:
    made = new_parser("completion", DESCRIPTION, examples=EXAMPLES)
    made.add_argument("shell", choices=tuple(SHELLS), help="the shell that will read it")
    return made


def _spec(name: str) -> Spec:
    actions = command(name).parser()._actions
    arguments = [action for action in actions if not action.option_strings]
    return Spec(
        name=name,
        what=COMMANDS[name],
        options=tuple(_option(action) for action in actions if action.option_strings),
        words=tuple(word for action in arguments for word in action.choices or ()),
        takes_file=any(_is_file(action) or action.dest == "file" for action in arguments),
    )


def _option(action: argparse.Action) -> Option:
    return Option(
        names=tuple(action.option_strings),
        what=(action.help or "").replace("%%", "%"),
        takes_value=action.nargs != 0,
        choices=tuple(action.choices or ()),
        takes_file=_is_file(action),
    )


def _is_file(action: argparse.Action) -> bool:
    return action.type is Path or action.metavar in FILE_METAVARS
