"""``trio-tlserve runtime.toml``: serve a model until told to stop."""

from __future__ import annotations

import argparse
import json
import logging
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from tlserve import log
from tlserve.cli.arguments import add_choice_arguments, choose, new_parser
from tlserve.cli.describe import describe, describe_access
from tlserve.cli.process import make_room_for, survive_lost_stderr
from tlserve.cli.progress import Progress
from tlserve.config import ServeConfig
from tlserve.errors import ConfigError, StoppedWhileLoading
from tlserve.server import Server, run

DESCRIPTION = """Serve a model over HTTP with the OpenAI API until SIGTERM or SIGINT, which let requests in flight
finish; a second signal ends it at once."""
EXAMPLES = (
    "trio-tlserve runtime.toml",
    "trio-tlserve --model-dir model.gguf",
    "TL_ENGINE__HTTP_LISTEN=127.0.0.1:8001 trio-tlserve runtime.toml",
    "trio-tlserve --help   # the other commands",
)


def main(argv: Sequence[str]) -> int:
    arguments = _parse(argv)
    survive_lost_stderr()
    choice = choose(parser(), arguments)
    config = choice.config
    log.configure(config.log_format)
    make_room_for(config.max_connections)
    try:
        if config.log_format == "text":
            _run_in_text(config)
        else:
            run(config, progress=_LoggedProgress(), on_ready=_log_ready)
    except ConfigError as error:
        raise choice.explain(error) from None
    except StoppedWhileLoading:
        _end_at_once()
    log.LOGGER.info("stopped")
    logging.shutdown()
    return 0


def parser() -> argparse.ArgumentParser:
    made = new_parser("", DESCRIPTION, examples=EXAMPLES)
    add_choice_arguments(made)
    made.add_argument("--config", type=Path, metavar="FILE", help="the runtime.toml, as an option")
    return made


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    arguments = parser().parse_args(argv)
    if arguments.file is not None and arguments.config is not None:
        parser().error("give one configuration file, as trio-tlserve runtime.toml or --config runtime.toml")
    arguments.file = arguments.file or arguments.config
    return arguments


def _run_in_text(config: ServeConfig) -> None:
    progress = Progress(sys.stderr)

    def on_ready(server: Server) -> None:
        progress.close()
        print(banner(server), file=sys.stderr, flush=True)

    with progress:
        run(config, progress=progress, on_ready=on_ready)


def _end_at_once() -> None:
    """The thread that loads may be inside the compiler, which does not survive the interpreter's own clean-up."""
    log.LOGGER.info("stopped while loading")
    logging.shutdown()
    os._exit(StoppedWhileLoading.exit_status)


class _LoggedProgress:
    """A line of the log for each stage of a start, where every line must be a record."""

    def __init__(self) -> None:
        self._what = ""

    def __call__(self, what: str, done: int, total: int) -> None:
        if what != self._what:
            self._what = what
            log.LOGGER.info("loading", extra={"stage": what})


def _log_ready(server: Server) -> None:
    """What the banner says, as one record."""
    host, port = server.health_addr
    view, config = server.overview, server.config
    fields = asdict(view) | {"total_bytes": view.total_bytes}
    fields["model"] = fields.pop("model_id")
    has = {"tls": config.tls_cert is not None, "api_keys": config.api_keys_file is not None}
    addresses = {"url": server.base_url, "health": f"{host}:{port}"}
    log.LOGGER.info("serving", extra=fields | has | addresses)


def banner(server: Server) -> str:
    """What is served, from how much memory, where, and a line to try it with."""
    host, port = server.health_addr
    health = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    lines = [*describe(server.overview), *describe_access(server.config, server.base_url, f"{health}/healthz")]
    title = f"serving {server.config.model_id} at {server.base_url}"
    return "\n".join([title, *(f"  {line}" for line in lines), "", f"    {_curl(server)}", ""])


def _curl(server: Server) -> str:
    """A command that streams an answer, with what a certificate of one's own and keys take."""
    message = {"role": "user", "content": "Hi"}
    body = json.dumps({"model": server.config.model_id, "messages": [message], "stream": True})
    words = ["curl", "-N", f"{server.base_url}/chat/completions", "-d", shlex.quote(body)]
    if server.config.tls_cert is not None:
        words[1:1] = ["--cacert", shlex.quote(str(server.config.tls_cert))]
    if server.config.api_keys_file is not None:
        words[-2:-2] = ["-H", '"Authorization: Bearer $API_KEY"']
    return " ".join(words)
