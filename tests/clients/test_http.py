"""No client library at all: curl, and httpx reading the events by itself."""

from __future__ import annotations

import json
import subprocess

from tests.examples import COLOURS, EXAMPLES, MODEL, STORY, ask, environment, run, run_python, text_of
from tests.scrape import metric, wait_until_free
from tlserve import ServerHandle


def test_httpx_example(server: ServerHandle) -> None:
    assert run_python("httpx_sse.py", server) == text_of(ask(server, COLOURS)) + "\n"


def test_curl_example(server: ServerHandle) -> None:
    events = run(["sh", EXAMPLES / "curl_stream.sh"], environment(server)).split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    deltas = [json.loads(event.removeprefix("data: "))["choices"][0]["delta"] for event in events[:-2]]
    assert "".join(delta.get("content", "") for delta in deltas) == text_of(ask(server, COLOURS))


def test_killing_curl_frees_the_blocks(slow_server: ServerHandle) -> None:
    body = json.dumps({"model": MODEL, "messages": STORY, "temperature": 0, "stream": True})
    command = ["curl", "-sN", f"{slow_server.base_url}/chat/completions", "-d", body]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith(b"data: ")
        assert metric(slow_server, 'tl_engine_kv_blocks{state="used"}') > 0
        process.kill()
    wait_until_free(slow_server)
