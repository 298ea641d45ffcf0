"""The ``trio-tlserve`` command: the first argument names a command of ``tlserve.cli``; serving is the default."""

from __future__ import annotations

import difflib
import errno
import importlib.metadata
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from tlserve.cli.commands import COMMANDS, GROUPS, command
from tlserve.cli.terminal import discard
from tlserve.errors import ConfigError, ExitError

HELP = (
    """usage: trio-tlserve runtime.toml
       trio-tlserve --model-dir PATH
       trio-tlserve COMMAND ...

An OpenAI-compatible server for a model on a CPU.
"""
    + "".join(
        f"\n{group}:\n" + "".join(f"  {name:<11} {what}\n" for name, what in commands.items())
        for group, commands in GROUPS.items()
    )
    + """
examples:
  trio-tlserve config --model-dir path/to/model.gguf > runtime.toml
  trio-tlserve check runtime.toml   # would it start, and what fits?
  trio-tlserve runtime.toml         # serve it on http://127.0.0.1:8000/v1
  trio-tlserve chat --model-dir path/to/model.gguf

trio-tlserve COMMAND --help says more of each; --version prints the version.
Documentation: README.md and docs/ of the sources; docs/command-line.md has every option."""
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the result is the exit status of the process."""
    try:
        try:
            return _run(list(sys.argv[1:] if argv is None else argv))
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except ExitError as error:
        print(f"trio-tlserve: {' '.join(str(error).split())}", file=sys.stderr)
        return error.exit_status
    except OSError as error:
        if error.filename is not None or error.errno not in (errno.EPIPE, errno.ENOSPC):
            raise
        discard(sys.stdout)
        if error.errno == errno.ENOSPC:
            print(f"trio-tlserve: stdout: {error.strerror}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _run(arguments: list[str]) -> int:
    if arguments[:1] in (["--help"], ["-h"], ["help"]):
        print(HELP)
        return 0
    if arguments == ["--version"]:
        print(f"trio-tlserve {importlib.metadata.version('trio-tlserve')}")
        return 0
    name = arguments.pop(0) if arguments and arguments[0] in COMMANDS else "serve"
    if name == "serve" and (near := _misspelled(arguments)):
        print(f"trio-tlserve: {arguments[0]} is neither a command nor a file; did you mean {near}?", file=sys.stderr)
        return ConfigError.exit_status
    return command(name).main(arguments)


def _misspelled(arguments: Sequence[str]) -> str | None:
    """The command that the first argument may have been meant to be."""
    if not arguments or arguments[0].startswith("-") or Path(arguments[0]).exists():
        return None
    return next(iter(difflib.get_close_matches(arguments[0], COMMANDS, n=1)), None)


if __name__ == "__main__":
    sys.exit(main())
