"""``trio-tlserve check runtime.toml``: would it start, and what fits into memory? Nothing is compiled or packed."""

from __future__ import annotations

import argparse
import errno
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import trio

from tlserve.cli.arguments import Choice, add_choice_arguments, add_json_option, choose, new_parser
from tlserve.cli.check_warnings import warnings_of
from tlserve.cli.describe import NAME_WIDTH, describe, describe_access
from tlserve.config import ENV_PREFIX, ServeConfig
from tlserve.errors import ConfigError, ListenError
from tlserve.loading import open_model
from tlserve.overview import Overview
from tlserve.server import open_listeners, read_access

DESCRIPTION = """Say whether a configuration would start, and what fits into memory, without loading the model. The
numbers are those that a start comes to. Exit status 0 when it would start, else that of the start: 2 for the
configuration, 3 for the model, 4 for an address."""
EXAMPLES = (
    "trio-tlserve check runtime.toml",
    "trio-tlserve check --model-dir model.gguf",
    "TL_ENGINE__KV_CACHE_MB=512 trio-tlserve check runtime.toml --json",
)


def main(argv: Sequence[str]) -> int:
    arguments = parser().parse_args(argv)
    choice = choose(parser(), arguments)
    try:
        overview, notes = _examine(choice.config)
    except ConfigError as error:
        raise ConfigError(f"{choice.name}: {error}") from None
    notes += warnings_of(choice.config, overview)
    print(
        json.dumps(_document(choice, overview, notes), indent=2) if arguments.json else _text(choice, overview, notes)
    )
    return 0


def parser() -> argparse.ArgumentParser:
    made = new_parser("check", DESCRIPTION, examples=EXAMPLES)
    add_choice_arguments(made)
    add_json_option(made)
    return made


def _examine(config: ServeConfig) -> tuple[Overview, list[str]]:
    """What a start looks at, in its order; a port that is in use may be that of the server to be replaced."""
    read_access(config)
    notes = [*_try_address(config.health_listen, "health_listen"), *_try_address(config.http_listen, "http_listen")]
    return open_model(config).overview, notes


def _try_address(listen: str, key: str) -> list[str]:
    async def listen_once() -> None:
        for listener in await open_listeners(listen, key):
            await listener.aclose()

    try:
        trio.run(listen_once)
    except ListenError as error:
        if isinstance(error.__context__, OSError) and error.__context__.errno == errno.EADDRINUSE:
            return [str(error)]
        raise
    return []


def _document(choice: Choice, overview: Overview, notes: list[str]) -> dict[str, Any]:
    config = choice.config
    return {
        "sources": choice.sources,
        **asdict(overview),
        "total_bytes": overview.total_bytes,
        "num_tokens": overview.num_tokens,
        "num_full_streams": overview.num_full_streams,
        "tokens_each": overview.tokens_each,
        "http_listen": config.http_listen,
        "health_listen": config.health_listen,
        "warnings": notes,
    }


def _text(choice: Choice, overview: Overview, notes: list[str]) -> str:
    config = choice.config
    lines = [
        f"{choice.name} would start",
        *_keys(choice),
        *describe(overview),
        *describe_access(config, config.http_listen, config.health_listen),
        *(f"warning: {note}" for note in notes),
    ]
    return "\n".join(lines)


def _keys(choice: Choice) -> list[str]:
    """Which keys are set, by whom; the others have their defaults."""
    by_source: dict[str, list[str]] = {}
    for key, source in choice.sources.items():
        by_source.setdefault("environment" if source.startswith(ENV_PREFIX) else source, []).append(key)
    return [f"{f'set by {source}:':<{NAME_WIDTH}} {', '.join(keys)}" for source, keys in by_source.items()]
