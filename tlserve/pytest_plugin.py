"""The pytest plugin: a server for the tests of a program that talks to one.

    def test_my_program(tlserve_server):
        client = OpenAI(base_url=tlserve_server.base_url, api_key="none")

It is loaded by every run of pytest where this package is installed, so it imports the server when a test asks for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tlserve.config import ServeConfig

PATIENCE = 1.0  # seconds that kernels may take without a word; loading all of them from the cache takes less
_HELP = "model for tlserve_server: a directory or a .gguf file (default: a tiny random one)"


@dataclass(frozen=True, slots=True)
class TlserveServer:
    """A server that is ready, for as long as the session lasts."""

    base_url: str  # ends in /v1: what an OpenAI client takes as its base_url
    health_url: str  # of /healthz, /readyz and /metrics
    model: str  # the id that requests name


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("tlserve").addoption("--tlserve-model", metavar="PATH", help=_HELP)
    parser.addini("tlserve_model", f"{_HELP}; relative to the file of this setting")


@pytest.fixture(scope="session")
def tlserve_server(pytestconfig: pytest.Config) -> Iterator[TlserveServer]:
    """A model server on free ports of 127.0.0.1, one for the session (with pytest-xdist: for each worker).

    The model is that of ``--tlserve-model``, else of the setting ``tlserve_model``, else a tiny random Llama that
    comes with the package: its answers mean nothing, and are the same every time.
    """
    from tlserve.errors import ExitError
    from tlserve.server_thread import spawn

    try:
        config = _config(pytestconfig)
        with _open_terminal(pytestconfig) as write_line:
            server = spawn(config, progress=_CompilingNotice(write_line))
    except ExitError as error:
        raise pytest.fail.Exception(f"tlserve_server: {error}", pytrace=False) from None
    with server:
        host, port = server.health_addr
        yield TlserveServer(server.base_url, f"http://{host}:{port}", config.model_id)


def _config(pytestconfig: pytest.Config) -> ServeConfig:
    from tlserve.config import ServeConfig
    from tlserve.data import TINY_LLAMA

    option: str | None = pytestconfig.getoption("--tlserve-model")
    setting: str = pytestconfig.getini("tlserve_model")
    if option:
        return ServeConfig.for_model(pytestconfig.invocation_params.dir / option)
    if setting:
        directory = pytestconfig.inipath.parent if pytestconfig.inipath else pytestconfig.rootpath
        return ServeConfig.for_model(directory / setting)
    return ServeConfig.for_model(TINY_LLAMA)


@contextmanager
def _open_terminal(pytestconfig: pytest.Config) -> Iterator[Callable[[str], None]]:
    """Write lines past the capturing of output, on a line of their own."""
    plugins = pytestconfig.pluginmanager
    capture, reporter = plugins.getplugin("capturemanager"), plugins.getplugin("terminalreporter")

    def write_line(text: str) -> None:
        # What a worker of pytest-xdist writes is seen by nobody.
        if reporter is None or hasattr(pytestconfig, "workerinput"):
            with suppress(OSError), open("/dev/tty", "w") as terminal:
                print(text, file=terminal)
        else:
            reporter.ensure_newline()
            reporter.write_line(text)

    with capture.global_and_fixture_disabled() if capture else nullcontext():
        yield write_line


class _CompilingNotice:
    """Progress of a start that says one thing: why the first one on a machine takes so long."""

    def __init__(self, write_line: Callable[[str], None]) -> None:
        self._write_line: Callable[[str], None] | None = write_line  # None once it has been said
        self._began: float | None = None

    def __call__(self, what: str, done: int, total: int) -> None:
        if what != "kernels" or self._write_line is None:
            return
        if self._began is None:
            self._began = time.monotonic()
        elif time.monotonic() - self._began > PATIENCE:
            self._write_line("tlserve: compiling kernels, once on this machine; this takes about half a minute")
            self._write_line = None
