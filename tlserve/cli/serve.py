"""``trio-tlserve runtime.toml``: serve a model until told to stop."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence

from tlserve import log
from tlserve.cli.process import make_room_for, survive_lost_stderr
from tlserve.cli.start_progress import StartProgress
from tlserve.config import ServeConfig
from tlserve.errors import ConfigError, StoppedWhileLoading
from tlserve.server import Server, run

DESCRIPTION = "Serve a model over HTTP with the OpenAI API until SIGTERM or SIGINT; a second signal ends it at once."


def main(argv: Sequence[str]) -> int:
    path = _parse(argv)
    survive_lost_stderr()
    config = ServeConfig.load(path)
    log.configure(config.log_format)
    make_room_for(config.max_connections)
    is_text = config.log_format == "text"
    try:
        run(
            config,
            progress=StartProgress(sys.stderr) if is_text else _LoggedProgress(),
            on_ready=_show_banner if is_text else _log_ready,
        )
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    except StoppedWhileLoading:
        _end_at_once()
    log.LOGGER.info("stopped")
    logging.shutdown()
    return 0


def _parse(argv: Sequence[str]) -> str:
    parser = argparse.ArgumentParser(prog="trio-tlserve", description=DESCRIPTION)
    parser.add_argument("file", nargs="?", help="a runtime.toml; TL_ENGINE__<KEY> variables override its keys")
    parser.add_argument("--config", dest="config", metavar="FILE", help="the same, as an option")
    arguments = parser.parse_args(argv)
    if (arguments.file is None) == (arguments.config is None):
        parser.error("give one configuration file, as trio-tlserve runtime.toml or trio-tlserve --config runtime.toml")
    chosen: str = arguments.file or arguments.config
    return chosen


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
    host, port = server.health_addr
    fields = {"model": server.config.model_id, "url": server.base_url, "health": f"{host}:{port}"}
    log.LOGGER.info("serving", extra=fields)


def _show_banner(server: Server) -> None:
    url, model = server.base_url, server.config.model_id
    body = f'{{"model":"{model}","messages":[{{"role":"user","content":"Hi"}}],"stream":true}}'
    host, port = server.health_addr
    print(
        f"serving {model} at {url}, health and metrics at http://{host}:{port}; try\n\n"
        f"    curl -N {url}/chat/completions -d '{body}'\n",
        file=sys.stderr,
        flush=True,
    )
