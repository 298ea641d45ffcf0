"""What command lines have in common: the layout of help, kinds of values, options that several commands have."""

from __future__ import annotations

import argparse
import math
import os
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tlserve.cli.refusal import KEY_VARIABLE
from tlserve.config import ENV_PREFIX, ServeConfig, sources, with_source
from tlserve.errors import ConfigError
from tlserve.http.client import Origin

HELP_WIDTH = 100
MODEL_VARIABLE = f"{ENV_PREFIX}MODEL_DIR"


def new_parser(name: str, description: str, *, examples: Sequence[str]) -> argparse.ArgumentParser:
    """A parser of ``trio-tlserve name``, whose help ends with lines that can be pasted."""
    return argparse.ArgumentParser(
        prog=f"trio-tlserve {name}".strip(),
        description=textwrap.fill(" ".join(description.split()), HELP_WIDTH),
        epilog="\n".join(["examples:", *(f"  {line}" for line in examples)]),
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=28, width=HELP_WIDTH),
    )


def integer(text: str) -> int:
    """A whole number; argparse shows the message."""
    return _whole(text, None)


def positive(text: str) -> int:
    return _whole(text, 1)


def natural(text: str) -> int:
    return _whole(text, 0)


def number(text: str) -> float:
    value = _finite(text)
    if value is None:
        raise argparse.ArgumentTypeError(f"must be a number, got {text!r}")
    return value


def positive_float(text: str) -> float:
    value = _finite(text)
    if value is None or value <= 0:
        raise argparse.ArgumentTypeError(f"must be a number above 0, got {text!r}")
    return value


def _whole(text: str, least: int | None) -> int:
    try:
        value = int(text)
        if least is None or value >= least:
            return value
    except ValueError:
        pass
    rule = "an integer" if least is None else f"an integer of {least} or more"
    raise argparse.ArgumentTypeError(f"must be {rule}, got {text!r}")


def _finite(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def add_json_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print it as JSON")


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Which model, in which precision, on how many threads: for commands without a configuration file."""
    parser.add_argument(
        "--model-dir", required=True, type=Path, metavar="PATH", help="a model directory or a .gguf file"
    )
    parser.add_argument("--threads", type=positive, metavar="N", help="compute threads; default: all cores")
    parser.add_argument(
        "--weights",
        choices=("auto", "f32", "q8", "q4"),
        default="auto",
        help="precision in memory; default: the file's",
    )
    parser.add_argument("--kv-dtype", choices=("f32", "f16"), default="f16", help="of keys and values; default: f16")
    add_json_option(parser)


def engine_config(arguments: argparse.Namespace, **overrides: Any) -> ServeConfig:
    """The configuration that the engine options ask for. Raises ConfigError."""
    given = {"threads": arguments.threads} if arguments.threads is not None else {}
    chosen = {"weights": arguments.weights, "kv_dtype": arguments.kv_dtype}
    return ServeConfig.for_model(arguments.model_dir, **given, **chosen, **overrides)


def add_target_options(options: argparse._ActionsContainer) -> None:
    """Which model of a running server, and the key to it; ``--base-url`` is added by each command in its own way."""
    options.add_argument("--model", metavar="ID", help="default: the first of /v1/models")
    key = from_environment(KEY_VARIABLE)
    what = f"sent as a bearer token; default: ${KEY_VARIABLE}"
    options.add_argument("--api-key", type=_bearer_token, metavar="KEY", default=key, help=what)


def _bearer_token(text: str) -> str:
    """What a header can carry. The message does not quote a secret."""
    if not all("!" <= character <= "~" for character in text):
        raise argparse.ArgumentTypeError(f"a key, also that of ${KEY_VARIABLE}, is ASCII without spaces or line ends")
    return text


def from_environment(name: str) -> str | None:
    """The value of a variable; an empty one is none."""
    return os.environ.get(name) or None


def api_origin(parser: argparse.ArgumentParser, base_url: str) -> Origin:
    """Of the value of --base-url; without a path it is that of a server's API."""
    try:
        origin = Origin.parse(base_url)
    except ValueError as error:
        parser.error(f"--base-url: {error}")
    return origin if origin.path else replace(origin, path="/v1")


@dataclass(frozen=True)
class Choice:
    """A configuration, what it was read from, and where each key that is set has its value from."""

    config: ServeConfig
    name: str
    sources: dict[str, str]

    def explain(self, error: ConfigError) -> ConfigError:
        """The error with where its value is from."""
        return with_source(error, self.name, os.environ)


def add_choice_arguments(parser: argparse.ArgumentParser) -> None:
    """A file, a model with the defaults, or both; ``choose`` wants at least one of them."""
    parser.add_argument("file", nargs="?", type=Path, help=f"a runtime.toml; {ENV_PREFIX}<KEY> variables override it")
    parser.add_argument(
        "--model-dir", type=Path, metavar="PATH", help="the model; without a file with defaults for the rest"
    )


def choose(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> Choice:
    """The configuration that a file, the environment over it, and --model-dir over both come to. Raises ConfigError."""
    if arguments.file is None and arguments.model_dir is None:
        parser.error("give a runtime.toml or --model-dir PATH")
    by_option: dict[str, str] = {}
    env = dict(os.environ)
    if arguments.model_dir is not None:
        env[MODEL_VARIABLE] = os.path.abspath(arguments.model_dir)
        by_option = {"model_dir": "--model-dir"}
    if arguments.file is not None:
        config = ServeConfig.load(arguments.file, env)
        return Choice(config, str(arguments.file), sources(arguments.file.read_text(encoding="utf-8"), env) | by_option)
    try:
        config = ServeConfig.from_toml("", env)
    except ConfigError as error:
        raise with_source(error, str(arguments.model_dir), env) from None
    return Choice(config, str(arguments.model_dir), sources("", env) | by_option)
