"""``trio-tlserve check runtime.toml``: would it start, and what fits into memory? Nothing is compiled or packed."""

from __future__ import annotations

import argparse
import errno
import json
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict
from typing import Any

import trio

from tlserve.cli.arguments import Choice, add_choice_arguments, add_json_option, choose, new_parser
from tlserve.cli.check_warnings import warnings_of
from tlserve.cli.describe import NAME_WIDTH, describe, describe_access
from tlserve.config import ENV_PREFIX, ServeConfig
from tlserve.errors import ConfigError, ListenError
from tlserve.loading import open_model
from tlserve.model.checkpoint import open_checkpoint
from tlserve.overview import Overview
from tlserve.server import check_addresses, open_listeners, read_access

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
        raise choice.explain(error) from None
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
    """What a start looks at, in its order; what may be well and may not is a note."""
    read_access(config)
    open_checkpoint(config.model_dir)
    check_addresses(config)
    notes = trio.run(_try_addresses, config)
    return open_model(config).overview, notes


async def _try_addresses(config: ServeConfig) -> list[str]:
    """Listen on both for a moment. A port in use may be that of the server to be replaced, or our own other one."""
    notes = []
    async with AsyncExitStack() as opened:
        for key, listen in (("health_listen", config.health_listen), ("http_listen", config.http_listen)):
            try:
                for listener in await open_listeners(listen, key):
                    await opened.enter_async_context(listener)
            except ListenError as error:
                is_in_use = isinstance(error.__context__, OSError) and error.__context__.errno == errno.EADDRINUSE
                if not is_in_use:
                    raise
                notes.append(str(error))
    return notes


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
        kind = "environment" if source.startswith(ENV_PREFIX) else "option" if source.startswith("--") else source
        by_source.setdefault(kind, []).append(key)
    return [f"{f'set by {source}:':<{NAME_WIDTH}} {', '.join(keys)}" for source, keys in by_source.items()]
