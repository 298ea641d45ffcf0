"""The ``trio-tlserve`` command: the first argument names a command of ``tlserve.cli``; serving is the default."""

from __future__ import annotations

import importlib
import importlib.metadata
import signal
import sys
from collections.abc import Sequence

from tlserve.errors import ExitError

COMMANDS = {
    "serve": "serve a model until told to stop; the word may be left out",
    "config": "print the effective configuration, or the JSON schema of runtime.toml",
    "bench": "measure the engine alone: prompts, decoding, batches",
    "load": "measure any OpenAI-compatible server over HTTP",
    "perplexity": "how well a model predicts a text",
}
HELP = (
    "usage: trio-tlserve [COMMAND] ...\n       trio-tlserve runtime.toml\n\n"
    "An OpenAI-compatible server for a model on a CPU.\n\ncommands:\n"
    + "".join(f"  {name:<11} {what}\n" for name, what in COMMANDS.items())
    + "\ntrio-tlserve COMMAND --help says more of each; --version prints the version."
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the result is the exit status of the process."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] in (["--help"], ["-h"], ["help"]):
        print(HELP)
        return 0
    if arguments == ["--version"]:
        print(f"trio-tlserve {importlib.metadata.version('trio-tlserve')}")
        return 0
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
