"""The programs in docs/examples, run as a reader runs them: a process told by the environment where the server is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tlserve import ServeConfig, ServerHandle, spawn

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "docs" / "examples"
TINY = ROOT / "fixtures" / "tiny-llama"
MODEL = "smol-135m"  # the id that the examples name, which `make run` serves; here the tiny model has it
TIMEOUT = 60.0  # seconds; a program that takes longer hangs

# What the examples ask.
CAPITAL = [
    {"role": "system", "content": "Answer in one sentence."},
    {"role": "user", "content": "What is the capital of France?"},
]
COLOURS = [{"role": "user", "content": "Name three colours."}]
STORY = [{"role": "user", "content": "Tell me a story."}]  # 353 tokens of answer


def tiny_server(**overrides: Any) -> ServerHandle:
    return spawn(ServeConfig.for_model(TINY, model_id=MODEL, **overrides))


def environment(server: ServerHandle | None) -> dict[str, str]:
    """What a program is told: where the server is, by the variables that clients read, and nothing else of the kind."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("OPENAI_", "LLM_"))}
    clean["PYTHONUTF8"] = "1"
    if server is None:
        return clean
    return clean | {"OPENAI_BASE_URL": server.base_url, "OPENAI_API_KEY": "none"}


def run(command: Sequence[str | Path], env: dict[str, str]) -> str:
    """What a command prints; it must succeed."""
    done = subprocess.run(list(map(str, command)), env=env, capture_output=True, timeout=TIMEOUT, check=False)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode()


def run_python(name: str, server: ServerHandle | None, *arguments: str | Path) -> str:
    return run([sys.executable, EXAMPLES / name, *arguments], environment(server))


def ask(server: ServerHandle, messages: Sequence[dict[str, str]], **fields: Any) -> Any:
    """The whole greedy answer as it is on the wire, asked for without any of the clients."""
    body = {"model": MODEL, "messages": messages, "max_tokens": 32, "temperature": 0} | fields
    request = urllib.request.Request(f"{server.base_url}/chat/completions", json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=TIMEOUT) as reply:
        return json.load(reply)


def text_of(answer: Any) -> str:
    text: str = answer["choices"][0]["message"]["content"]
    return text


def text_and_cost(answer: Any) -> str:
    """How the examples print an answer."""
    return f"{text_of(answer)}\n{cost(answer)}"


def cost(answer: Any) -> str:
    usage = answer["usage"]
    return f"{usage['prompt_tokens']} tokens of prompt, {usage['completion_tokens']} of answer\n"
