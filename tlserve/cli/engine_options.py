"""The options that the commands without a server share: which model, in which precision, on how many threads."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from tlserve.config import ServeConfig


def positive(text: str) -> int:
    """An argument that counts something; argparse shows the message."""
    return _at_least(1, text)


def natural(text: str) -> int:
    return _at_least(0, text)


def _at_least(least: int, text: str) -> int:
    value = int(text)
    if value < least:
        raise argparse.ArgumentTypeError(f"must be {least} or more, got {value}")
    return value


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model-dir", required=True, type=Path, metavar="PATH", help="as model_dir in runtime.toml")
    parser.add_argument("--threads", type=positive, metavar="N", help="compute threads; default: all cores")
    parser.add_argument("--weights", choices=("auto", "f32", "q8", "q4"), default="auto")
    parser.add_argument("--kv-dtype", choices=("f32", "f16"), default="f16")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")


def engine_config(arguments: argparse.Namespace, **overrides: Any) -> ServeConfig:
    """The configuration that the shared options ask for. Raises ConfigError."""
    given = {"threads": arguments.threads} if arguments.threads is not None else {}
    chosen = {"weights": arguments.weights, "kv_dtype": arguments.kv_dtype}
    return ServeConfig.for_model(arguments.model_dir, **given, **chosen, **overrides)
