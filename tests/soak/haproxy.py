"""HAProxy before some servers, on loopback: it asks each one's /readyz and sends requests to those that are ready."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import trio

from tests.client import Address
from tests.soak.server_process import ServerProcess

CHECK_INTERVAL = 0.1  # seconds between two questions about readiness
SBIN = "/usr/sbin"  # where Debian's package puts it, which is not on everybody's path

CONFIG = """
global
    maxconn 1000
defaults
    mode http
    timeout connect 5s
    timeout client 120s
    timeout server 120s
    # A server that stops listening refuses connections before the next check: such requests go to the other one.
    # 503 is what a connection gets whose request met the drain; it has not been worked on, so it may go elsewhere too.
    retries 5
    retry-on conn-failure empty-response 503
    option redispatch 1
    http-reuse safe
    option http-server-close
    option http-buffer-request
frontend api
    bind {address}
    default_backend servers
backend servers
    balance roundrobin
    option httpchk
    http-check send meth GET uri /readyz ver HTTP/1.1 hdr Host health
    http-check expect status 200
    default-server check inter {interval}ms fall 1 rise 1
"""


def program() -> Path | None:
    found = shutil.which("haproxy", path=f"{os.environ.get('PATH', '')}:{SBIN}")
    return Path(found) if found else None


@asynccontextmanager
async def proxied(haproxy: Path, front: Address, servers: Sequence[ServerProcess]) -> AsyncIterator[None]:
    """Run HAProxy for the length of a block, which is entered when it listens."""
    lines = [
        f"    server server{number} {_text(server.api)} addr {server.health[0]} port {server.health[1]}\n"
        for number, server in enumerate(servers)
    ]
    config = CONFIG.format(address=_text(front), interval=int(CHECK_INTERVAL * 1000)).lstrip() + "".join(lines)
    with tempfile.NamedTemporaryFile("w", suffix=".cfg") as file:
        file.write(config)
        file.flush()
        process = await trio.lowlevel.open_process([str(haproxy), "-db", "-f", file.name], stdin=subprocess.DEVNULL)
        try:
            await _wait_listening(front, process)
            yield
        finally:
            with trio.CancelScope(shield=True):  # SIGKILL needs no deadline
                process.kill()
                await process.wait()


async def _wait_listening(front: Address, process: trio.Process) -> None:
    with trio.fail_after(10):
        while True:
            assert process.returncode is None, "haproxy has ended"
            with contextlib.suppress(OSError):
                await (await trio.open_tcp_stream(*front)).aclose()
                return
            await trio.sleep(0.05)


def _text(address: Address) -> str:
    return f"{address[0]}:{address[1]}"
