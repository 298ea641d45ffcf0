"""The ``llm`` command and its models in Python."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from tests.clients.conftest import Full
from tests.examples import CAPITAL, COLOURS, EXAMPLES, MODEL, STORY, TIMEOUT, ask, environment, run, text_of
from tests.scrape import metric, wait_until_free
from tlserve import ServerHandle

LLM = Path(sys.executable).with_name("llm")
QUESTION = COLOURS[0]["content"]


def home(server: ServerHandle, tmp_path: Path) -> dict[str, str]:
    """The environment of a user whose models are those of the example, at this server."""
    models = (EXAMPLES / "extra-openai-models.yaml").read_text()
    assert "http://127.0.0.1:8000/v1" in models
    (tmp_path / "extra-openai-models.yaml").write_text(models.replace("http://127.0.0.1:8000/v1", server.base_url))
    return environment(server) | {"LLM_USER_PATH": str(tmp_path), "PATH": f"{LLM.parent}:/usr/bin:/bin"}


def prompt(env: dict[str, str], *options: str, max_tokens: int = 32) -> str:
    greedy = ("-o", "temperature", "0", "-o", "max_tokens", str(max_tokens))
    return run([LLM, "-m", "smol", QUESTION, *greedy, *options], env)


def test_chat_example(server: ServerHandle, tmp_path: Path) -> None:
    printed = run(["sh", EXAMPLES / "llm_chat.sh"], home(server, tmp_path))
    assert printed == text_of(ask(server, CAPITAL)) + "\n"


def test_a_model_of_extra_openai_models_yaml_whole_and_streamed(server: ServerHandle, tmp_path: Path) -> None:
    env = home(server, tmp_path)
    expected = text_of(ask(server, COLOURS)) + "\n"
    assert prompt(env) == expected
    assert prompt(env, "--no-stream") == expected


def test_the_usage_is_shown(server: ServerHandle, tmp_path: Path) -> None:
    command = [str(LLM), "-m", "smol", QUESTION, "-o", "max_tokens", "8", "-u"]
    done = subprocess.run(command, env=home(server, tmp_path), capture_output=True, timeout=TIMEOUT, check=True)
    assert b"Token usage: 43 input, 8 output" in done.stderr


def test_the_models_are_listed(server: ServerHandle, tmp_path: Path) -> None:
    assert MODEL in run([LLM, "openai", "endpoint", server.base_url, "--models"], home(server, tmp_path))


def test_a_refusal_is_an_error_in_its_words(server: ServerHandle, tmp_path: Path) -> None:
    command = [str(LLM), "-m", "smol", QUESTION, "-o", "max_tokens", "100000"]
    done = subprocess.run(command, env=home(server, tmp_path), capture_output=True, timeout=TIMEOUT, check=False)
    assert done.returncode == 1
    assert b"max_tokens is 100000" in done.stderr


def test_a_schema_is_refused_by_name(server: ServerHandle, tmp_path: Path) -> None:
    command = [str(LLM), "openai", "endpoint", server.base_url, "-m", MODEL, QUESTION, "--schema", "name, hex"]
    done = subprocess.run(command, env=home(server, tmp_path), capture_output=True, timeout=TIMEOUT, check=False)
    assert done.returncode == 1
    assert b"response_format json_schema is not supported" in done.stderr


def test_a_full_server_is_asked_again(
    refused_once: Callable[[Callable[[], str]], str], told_full: Full, server: ServerHandle, tmp_path: Path
) -> None:
    env = home(told_full.server, tmp_path)
    answer = refused_once(lambda: prompt(env, max_tokens=3))
    assert answer == text_of(ask(server, COLOURS, max_tokens=3)) + "\n"


def test_an_interrupt_frees_the_blocks(slow_server: ServerHandle, tmp_path: Path) -> None:
    command = [str(LLM), "-m", "smol", STORY[0]["content"], "-o", "temperature", "0"]
    with subprocess.Popen(command, env=home(slow_server, tmp_path), stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.read(1) != b""
        assert metric(slow_server, 'tl_engine_kv_blocks{state="used"}') > 0
        process.send_signal(signal.SIGINT)
        process.stdout.read()
    wait_until_free(slow_server)
