"""The ``trio-tlserve`` command: the first argument names a command of ``tlserve.cli``; serving is the default."""

from __future__ import annotations

import importlib
import signal
import sys
from collections.abc import Sequence

from tlserve.errors import ExitError

COMMANDS = ("serve", "config", "bench", "load", "perplexity")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the result is the exit status of the process."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    name = arguments.pop(0) if arguments and arguments[0] in COMMANDS else "serve"
    command = importlib.import_module(f"tlserve.cli.{name}")
    try:
        status: int = command.main(arguments)
    except ExitError as error:
        print(f"trio-tlserve: {' '.join(str(error).split())}", file=sys.stderr)
        return error.exit_status
    except BrokenPipeError:
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return status


if __name__ == "__main__":
    sys.exit(main())
