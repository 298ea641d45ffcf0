"""The tables of options in docs/command-line.md, made from the parsers."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from tlserve.cli.commands import command

PAGE = Path(__file__).parents[2] / "docs" / "command-line.md"
_TABLE = re.compile(r"(<!-- options of (\w+): make generate -->\n).*?(<!-- end of options -->\n)", re.DOTALL)


def page_text(current: str) -> str:
    """``current`` with its tables made new."""
    return _TABLE.sub(lambda match: match[1] + options_table(match[2]) + match[3], current)


def documented_commands(page: str) -> list[str]:
    return [match[2] for match in _TABLE.finditer(page)]


def options_table(name: str) -> str:
    rows = [f"| {_spelling(action)} | {_help(action)} |" for action in command(name).parser()._actions]
    return "\n".join(["| | |", "|---|---|", *rows]) + "\n"


def _spelling(action: argparse.Action) -> str:
    if not action.option_strings:
        return f"`{action.dest}`"
    value = "" if action.nargs == 0 else f" {action.metavar or '{' + ','.join(map(str, action.choices or ())) + '}'}"
    return ", ".join(f"`{name}{value}`" for name in action.option_strings)


def _help(action: argparse.Action) -> str:
    return (action.help or "").replace("%%", "%").replace("<", "&lt;").replace("|", "\\|")
