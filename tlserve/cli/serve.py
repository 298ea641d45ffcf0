"""``trio-tlserve runtime.toml``: serve a model until told to stop."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence

from tlserve import log
from tlserve.cli.start_progress import StartProgress
from tlserve.config import ServeConfig
from tlserve.server import Server, run

DESCRIPTION = "Serve a model over HTTP with the OpenAI API until SIGTERM or SIGINT; a second signal ends it at once."


def main(argv: Sequence[str]) -> int:
    config = ServeConfig.load(_parse(argv))
    log.configure(config.log_format)
    run(config, progress=StartProgress(), on_ready=_show_banner)
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


def _show_banner(server: Server) -> None:
    url, model = server.base_url, server.config.model_id
    body = f'{{"model":"{model}","messages":[{{"role":"user","content":"Hi"}}],"stream":true}}'
    print(
        f"serving {model} at {url}; try\n\n    curl -N {url}/chat/completions -d '{body}'\n",
        file=sys.stderr,
        flush=True,
    )
