"""Servers with a small model for the clients to talk to: one that is quick, one that is slow, one that is full."""

from __future__ import annotations

import http.client
import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing

import pytest

from tests.examples import MODEL, STORY, environment, tiny_server
from tests.scrape import wait_for_metric
from tlserve import ServerHandle

STEP_DELAY = 0.05  # seconds: a story takes 18 seconds

# Else LiteLLM, when it is imported, asks the internet for a list of prices.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"


@pytest.fixture(scope="session")
def server() -> Iterator[ServerHandle]:
    with tiny_server() as server:
        yield server


@pytest.fixture(scope="session")
def slow_server() -> Iterator[ServerHandle]:
    """Its stories last longer than a test waits for anything."""
    with tiny_server(step_delay=STEP_DELAY) as server:
        yield server


@pytest.fixture
def told(server: ServerHandle, monkeypatch: pytest.MonkeyPatch) -> ServerHandle:
    """The server, which this process's environment names as that of OpenAI."""
    return _tell(server, monkeypatch)


@pytest.fixture
def told_slow(slow_server: ServerHandle, monkeypatch: pytest.MonkeyPatch) -> ServerHandle:
    return _tell(slow_server, monkeypatch)


@pytest.fixture
def told_full(monkeypatch: pytest.MonkeyPatch) -> Iterator[Full]:
    with Full() as full:
        _tell(full.server, monkeypatch)
        yield full


def _tell(server: ServerHandle, monkeypatch: pytest.MonkeyPatch) -> ServerHandle:
    for name, value in environment(server).items():
        monkeypatch.setenv(name, value)
    return server


class Full:
    """A server with one place to run and one to wait, both taken until ``make_room``."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._taken = ExitStack()
        self.server: ServerHandle

    def __enter__(self) -> Full:
        self.server = self._stack.enter_context(tiny_server(max_num_seqs=1, queue_capacity=1, step_delay=STEP_DELAY))
        self._stack.enter_context(self._taken)
        self._take_place()
        wait_for_metric(self.server, "tl_engine_active_sequences", 1)
        self._take_place()
        wait_for_metric(self.server, "tl_engine_queue_depth", 1)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def make_room(self) -> None:
        self._taken.close()
        wait_for_metric(self.server, "tl_engine_active_sequences", 0)

    def _take_place(self) -> None:
        connection = self._taken.enter_context(closing(http.client.HTTPConnection(*self.server.http_addr)))
        body = {"model": MODEL, "messages": STORY, "stream": True, "ignore_eos": True}
        connection.request("POST", "/v1/chat/completions", json.dumps(body))


@pytest.fixture
def refused_once(told_full: Full, caplog: pytest.LogCaptureFixture) -> Callable[[Callable[[], str]], str]:
    """Call a client on a full server, which has room once it has refused it; what the client then says."""
    caplog.set_level(logging.INFO, "tlserve")
    caplog.set_level(logging.INFO, "openai")

    def call(client: Callable[[], str]) -> str:
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(client)
            end = time.monotonic() + 30
            while not any(getattr(record, "status", None) == 429 for record in caplog.records):
                assert not answer.done(), answer.result()
                assert time.monotonic() < end, "the server was never asked"
                time.sleep(0.01)
            told_full.make_room()
            return answer.result(timeout=30)

    return call
