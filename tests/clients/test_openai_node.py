"""OpenAI's package for Node."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.clients.conftest import Full
from tests.examples import CAPITAL, COLOURS, EXAMPLES, STORY, ask, environment, run, run_python, text_and_cost, text_of
from tests.scrape import metric, wait_until_free
from tlserve import ServerHandle

HERE = Path(__file__).parent


@pytest.fixture
def node(tmp_path: Path) -> Callable[[str, ServerHandle], str]:
    """Run an example in a directory where ``npm install openai`` has been said."""
    (tmp_path / "node_modules").symlink_to(HERE / "node_modules")

    def call(name: str, server: ServerHandle) -> str:
        shutil.copy(EXAMPLES / name, tmp_path)
        return run(["node", tmp_path / name], environment(server))

    return call


Node = Callable[[str, ServerHandle], str]


def test_chat_example(node: Node, server: ServerHandle) -> None:
    assert node("openai_chat.mjs", server) == text_and_cost(ask(server, CAPITAL))


def test_stream_example(node: Node, server: ServerHandle) -> None:
    assert node("openai_stream.mjs", server) == text_and_cost(ask(server, COLOURS))


def test_embeddings_example_says_what_the_python_client_says(node: Node, server: ServerHandle) -> None:
    assert node("openai_embeddings.mjs", server) == run_python("openai_embeddings.py", server)


def test_errors_example(node: Node, server: ServerHandle) -> None:
    assert node("openai_errors.mjs", server).splitlines() == [
        "BadRequestError 400 temperature null",
        "BadRequestError 400 max_tokens context_length_exceeded",
        "NotFoundError 404 model model_not_found",
        "UnprocessableEntityError 422 n unsupported_parameter",
    ]


def test_cancel_example(node: Node, server: ServerHandle) -> None:
    printed = node("openai_cancel.mjs", server).removesuffix("\n")
    assert len(printed) >= 20
    assert text_of(ask(server, STORY, max_tokens=100)).startswith(printed)


def test_a_full_server_is_a_rate_limit_error_without_retries(told_full: Full) -> None:
    assert _start("ask.mjs", told_full.server, "0").communicate(timeout=60)[0] == "RateLimitError\n"


def test_a_full_server_is_asked_again(
    refused_once: Callable[[Callable[[], str]], str], told_full: Full, server: ServerHandle
) -> None:
    answer = refused_once(lambda: _start("ask.mjs", told_full.server, "2").communicate(timeout=60)[0])
    assert answer == text_of(ask(server, COLOURS, max_tokens=3)) + "\n"


def test_leaving_a_stream_frees_its_blocks_while_the_program_goes_on(slow_server: ServerHandle) -> None:
    with _start("leave.mjs", slow_server) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == "reading\n"
        assert metric(slow_server, 'tl_engine_kv_blocks{state="used"}') > 0
        process.stdin.write("leave\n")
        process.stdin.flush()
        assert process.stdout.readline() == "left\n"
        wait_until_free(slow_server)
        assert process.poll() is None
        process.stdin.close()
        assert process.wait(timeout=60) == 0


def _start(name: str, server: ServerHandle, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        ["node", str(HERE / name), *arguments],
        env=environment(server),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        encoding="utf-8",
    )
