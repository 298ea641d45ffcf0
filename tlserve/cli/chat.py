"""``trio-tlserve chat``: talk to a model in the terminal, through a running server or one of its own."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import trio

from tlserve.cli.arguments import (
    add_choice_arguments,
    add_target_options,
    api_origin,
    choose,
    from_environment,
    integer,
    new_parser,
    number,
    positive,
)
from tlserve.cli.chat_session import Session
from tlserve.cli.load_target import TargetError, find_model
from tlserve.cli.process import survive_lost_stderr
from tlserve.cli.progress import Progress
from tlserve.cli.refusal import URL_VARIABLE
from tlserve.cli.terminal import Terminal, one_line, output
from tlserve.config import ServeConfig
from tlserve.errors import ConfigError
from tlserve.http.client import ConnectionFailed
from tlserve.server_thread import spawn

DEFAULT_URL = "http://127.0.0.1:8000/v1"
LOOPBACK = "127.0.0.1:0"
MODEL_TIMEOUT = 60.0  # seconds for a server to name its model

DESCRIPTION = """Chat in the terminal. Without --base-url, --model-dir or a file it talks to the server of
OPENAI_BASE_URL, else to http://127.0.0.1:8000/v1; with a model or a runtime.toml it runs one of its own. Ctrl-C stops
an answer and leaves at the prompt, Ctrl-D leaves, /help lists commands. All that is piped in is one message, and only
its answer is printed."""
EXAMPLES = (
    "trio-tlserve chat",
    'trio-tlserve chat --model-dir model.gguf --system "Answer in one sentence."',
    "echo 'Name three colours.' | trio-tlserve chat --base-url http://127.0.0.1:8000/v1 --temperature 0",
)


def main(argv: Sequence[str]) -> int:
    arguments = parser().parse_args(argv)
    survive_lost_stderr()
    out, err = output(), Terminal(sys.stderr)
    if sys.stdin is None:
        return _fail("stdin is closed")
    headers = (("Authorization", f"Bearer {arguments.api_key}"),) if arguments.api_key else ()
    with _base_url(arguments) as base_url:
        origin = api_origin(parser(), base_url)
        try:
            model = arguments.model or trio.run(partial(find_model, origin, headers, patience=MODEL_TIMEOUT))
        except TargetError as error:
            is_away = arguments.base_url is None and isinstance(error.__context__, ConnectionFailed)
            hint = "; --base-url, --model-dir or a runtime.toml names another server or model" if is_away else ""
            return _fail(one_line(str(error)) + hint)
        return _converse(Session(origin, headers, _settings(arguments, model), out, err, system=arguments.system))


def parser() -> argparse.ArgumentParser:
    made = new_parser("chat", DESCRIPTION, examples=EXAMPLES)
    add_choice_arguments(made)
    add = made.add_argument
    add(
        "--base-url",
        metavar="URL",
        help=f"of a running server: http://HOST:PORT/v1; default: ${URL_VARIABLE}, else {DEFAULT_URL}",
    )
    add_target_options(made)
    add("--system", metavar="TEXT", help="the system message")
    add("--temperature", type=number, metavar="T", help="0 is greedy; default: the server's")
    add("--top-p", type=number, metavar="P", help="default: the server's")
    add("--max-tokens", type=positive, metavar="N", help="longest answer; default: what is left of the context")
    add("--seed", type=integer, metavar="N", help="the same seed draws the same answers")
    return made


@contextmanager
def _base_url(arguments: argparse.Namespace) -> Iterator[str]:
    """The URL to talk to, of a server that lives as long as the block where one was asked for."""
    is_own = arguments.file is not None or arguments.model_dir is not None
    if is_own and arguments.base_url is not None:
        parser().error("give --base-url, or a model of one's own by a runtime.toml or --model-dir, not both")
    if not is_own:
        yield arguments.base_url or from_environment(URL_VARIABLE) or DEFAULT_URL
        return
    choice = choose(parser(), arguments)
    with Progress() as progress:
        try:
            server = spawn(_private(choice.config), progress=progress)
        except ConfigError as error:
            raise choice.explain(error) from None
        except KeyboardInterrupt:  # the thread may be inside the compiler, which does not survive a normal end
            progress.close()
            os._exit(128 + signal.SIGINT)
    with server:
        yield server.base_url


def _private(config: ServeConfig) -> ServeConfig:
    """The same model for this process alone."""
    return replace(
        config, http_listen=LOOPBACK, health_listen=LOOPBACK, api_keys_file=None, tls_cert=None, tls_key=None
    )


def _settings(arguments: argparse.Namespace, model: str) -> dict[str, object]:
    names = ("temperature", "top_p", "max_tokens", "seed")
    given = {name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None}
    return {"model": model, **given}


def _converse(session: Session) -> int:
    """A dialogue on a terminal; otherwise one message, whose answer decides the exit status."""
    if sys.stdin.isatty() and sys.stdout.isatty():
        import readline  # noqa: F401 - input() has a history and can be edited once it is imported

        session.out.say(f"{session.settings['model']}; /help lists commands, Ctrl-D leaves")
        session.talk(input)
        return 0
    try:
        text = sys.stdin.buffer.read().decode().strip()
    except UnicodeDecodeError as error:
        return _fail(f"stdin is not UTF-8 at byte {error.start}")
    except OSError as error:
        return _fail(f"stdin: {error.strerror}")
    failure = session.answer(text) if text else "stdin is empty"
    return _fail(failure) if failure else 0


def _fail(why: str) -> int:
    print(f"trio-tlserve chat: {why}", file=sys.stderr)
    return 1
