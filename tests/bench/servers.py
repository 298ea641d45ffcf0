"""A server as a process of its own: how long it takes to be ready, how much memory it takes, and its end."""

from __future__ import annotations

import contextlib
import http.client
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.bench.commands import OURS, ROOT, Llama
from tlserve.config import ServeConfig

READY_TIMEOUT = 300.0  # seconds
POLL_INTERVAL = 0.01


@dataclass(frozen=True)
class RunningServer:
    port: int
    pid: int
    ready_seconds: float  # from the start of the process

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    @property
    def peak_memory(self) -> int:
        """Bytes resident at most so far, mapped files included."""
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
        raise AssertionError("no VmHWM")


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


@contextlib.contextmanager
def running(command: Sequence[str | Path], port: int, ready_path: str, ready_port: int) -> Iterator[RunningServer]:
    """Run a server for the length of a block. Raises RuntimeError, with its output, when it does not get ready."""
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        start = time.monotonic()
        process = subprocess.Popen([str(part) for part in command], stdout=log, stderr=log, cwd=ROOT)
        try:
            while not _is_ready(ready_port, ready_path):
                if process.poll() is not None or time.monotonic() - start > READY_TIMEOUT:
                    log.seek(0)
                    raise RuntimeError(f"{command[0]} did not get ready:\n{log.read()[-2000:]}")
                time.sleep(POLL_INTERVAL)
            yield RunningServer(port, process.pid, time.monotonic() - start)
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextlib.contextmanager
def our_server(model: Path, **keys: object) -> Iterator[RunningServer]:
    """``keys`` are keys of the [engine] table."""
    port, health_port = free_port(), free_port()
    listen = {"http_listen": f"127.0.0.1:{port}", "health_listen": f"127.0.0.1:{health_port}"}
    config = ServeConfig.for_model(model, model_id="bench", **(listen | keys))
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
        file.write(config.to_toml())
        file.flush()
        with running([*OURS, file.name], port, "/readyz", health_port) as server:
            yield server


@contextlib.contextmanager
def llama_server(llama: Llama, model: Path, *, threads: int, streams: int, context: int) -> Iterator[RunningServer]:
    """``context``: tokens of KV cache for all streams together."""
    port = free_port()
    size = ["-t", str(threads), "-np", str(streams), "-c", str(context)]
    place = ["--host", "127.0.0.1", "--port", str(port)]
    with running([llama.program("llama-server"), "-m", model, *size, *place], port, "/health", port) as server:
        yield server


def _is_ready(port: int, path: str) -> bool:
    try:
        return _get(port, path) == 200
    except OSError:
        return False


def _get(port: int, path: str) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    finally:
        connection.close()


class HealthPoller:
    """Asks a server how it is, again and again, on a thread of its own, while something else loads it."""

    def __init__(self, port: int, *, interval: float = 0.02) -> None:
        self.seconds: list[float] = []
        self._port = port
        self._interval = interval
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._poll)

    def __enter__(self) -> HealthPoller:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    def _poll(self) -> None:
        while not self._stop.wait(self._interval):
            start = time.perf_counter()
            assert _get(self._port, "/healthz") == 200
            self.seconds.append(time.perf_counter() - start)
