"""The commands: what each is for, in the groups in which ``--help`` shows them.

Each is a module of this package with ``parser()``, which describes its command line, and ``main(argv)``, which gives
the exit status.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence
from typing import Protocol, cast

GROUPS = {
    "serve a model": {
        "serve": "serve until told to stop; the word may be left out",
        "check": "say whether a configuration would start, and what fits into memory",
        "config": "print the effective configuration, or the JSON schema of runtime.toml",
        "compile": "compile every kernel ahead of the first start",
    },
    "talk to it": {
        "chat": "chat in the terminal, with a running server or with a model",
    },
    "measure": {
        "bench": "measure the engine alone: prompts, decoding, batches",
        "load": "measure any OpenAI-compatible server over HTTP",
        "perplexity": "how well a model predicts a text",
        "conform": "try a running server against the rules of the API, case by case",
    },
    "set up": {
        "completion": "print a script that completes commands, options and files in a shell",
    },
}
COMMANDS = {name: what for group in GROUPS.values() for name, what in group.items()}


class Command(Protocol):
    """A module of this package that is a command."""

    def parser(self) -> argparse.ArgumentParser: ...

    def main(self, argv: Sequence[str]) -> int: ...


def command(name: str) -> Command:
    """Imported when asked for: a compiler comes with most of them."""
    return cast(Command, importlib.import_module(f"tlserve.cli.{name}"))
