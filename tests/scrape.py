"""What a live server's metrics page says."""

from __future__ import annotations

import time
import urllib.request

from tlserve import Server, ServerHandle

AnyServer = Server | ServerHandle


def metric(server: AnyServer, name: str) -> float:
    host, port = server.health_addr
    with urllib.request.urlopen(f"http://{host}:{port}/metrics") as reply:
        page = reply.read().decode()
    return next(float(line.rsplit(" ", 1)[1]) for line in page.splitlines() if line.startswith(f"{name} "))


def wait_for_metric(server: AnyServer, name: str, value: float) -> None:
    end = time.monotonic() + 5
    while metric(server, name) != value:
        assert time.monotonic() < end, (name, metric(server, name))
        time.sleep(0.01)


def wait_until_free(server: AnyServer) -> None:
    """No request runs any more, and none holds a block."""
    wait_for_metric(server, "tl_engine_active_sequences", 0)
    wait_for_metric(server, 'tl_engine_kv_blocks{state="used"}', 0)
