"""nginx and HAProxy before some servers, on loopback, with the files of docs/deploy/: only addresses are put in."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import trio

from tests.client import Address
from tests.deploy.programs import DEPLOY

CHECK_INTERVAL = 1.0  # seconds between two questions about readiness, as haproxy.cfg says
# What is around a file of conf.d. nginx keeps bodies in files; here they are its own.
NGINX_MAIN = """
daemon off;
worker_processes 1;
pid {scratch}/pid;
error_log {scratch}/error.log;
events {{ worker_connections 256; }}
http {{
    access_log off;
    client_body_temp_path {scratch}/body;
    proxy_temp_path {scratch}/proxy;
    fastcgi_temp_path {scratch}/fastcgi;
    uwsgi_temp_path {scratch}/uwsgi;
    scgi_temp_path {scratch}/scgi;
    include {scratch}/site.conf;
}}
"""


@dataclass(frozen=True)
class Backend:
    """The two addresses of a server."""

    api: Address
    health: Address


def haproxy_config(front: Address, backends: Sequence[Backend]) -> str:
    """docs/deploy/haproxy.cfg with these addresses."""
    servers = [
        f"    server server{number} {_text(backend.api)} addr {backend.health[0]} port {backend.health[1]}\n"
        for number, backend in enumerate(backends, 1)
    ]
    text = _replaced(r"^ +bind .*$", f"    bind {_text(front)}", (DEPLOY / "haproxy.cfg").read_text())
    return _without(r"^ +server .*\n", text) + "".join(servers)


def nginx_config(front: Address, backends: Sequence[Backend]) -> str:
    """docs/deploy/nginx.conf with these addresses; what belongs inside http { }."""
    server = re.compile(r"^ +server \S+:\d+(.*;)$", re.MULTILINE)
    text = (DEPLOY / "nginx.conf").read_text()
    found = server.search(text)
    assert found is not None
    lines = [f"    server {_text(backend.api)}{found[1]}" for backend in backends]
    text = server.sub("\n".join(lines), text, count=1)
    text = _without(r"^ +server 10\..*\n", text)
    return _replaced(r"^ +listen .*$", f"    listen {_text(front)};", text)


@asynccontextmanager
async def haproxy(program: Path, front: Address, backends: Sequence[Backend]) -> AsyncIterator[None]:
    """Run HAProxy for the length of a block, which is entered when it listens."""
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "haproxy.cfg"
        file.write_text(haproxy_config(front, backends))
        async with _running([str(program), "-db", "-f", str(file)], front):
            yield


@asynccontextmanager
async def nginx(program: Path, front: Address, backends: Sequence[Backend]) -> AsyncIterator[None]:
    """Run nginx for the length of a block, which is entered when it listens."""
    with tempfile.TemporaryDirectory() as scratch:
        main = write_nginx(Path(scratch), nginx_config(front, backends))
        async with _running([str(program), "-e", f"{scratch}/error.log", "-c", str(main)], front):
            yield


def write_nginx(scratch: Path, site: str) -> Path:
    """A whole configuration around ``site``; nginx has its files in ``scratch``."""
    scratch.chmod(0o755)  # its workers are another user's where it is started by root
    (scratch / "site.conf").write_text(site)
    main = scratch / "nginx.conf"
    main.write_text(NGINX_MAIN.format(scratch=scratch))
    return main


@asynccontextmanager
async def _running(command: list[str], front: Address) -> AsyncIterator[None]:
    """In a session of its own: nginx has workers, which end with it."""
    process = await trio.lowlevel.open_process(command, stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        await _wait_listening(front, process)
        yield
    finally:
        with trio.CancelScope(shield=True):  # SIGKILL needs no deadline
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 9)
            await process.wait()


async def _wait_listening(front: Address, process: trio.Process) -> None:
    with trio.fail_after(10):
        while True:
            assert process.returncode is None, "the proxy has ended"
            with contextlib.suppress(OSError):
                await (await trio.open_tcp_stream(*front)).aclose()
                return
            await trio.sleep(0.05)


def _replaced(pattern: str, by: str, text: str) -> str:
    result, count = re.subn(pattern, by, text, flags=re.MULTILINE)
    assert count == 1, f"{pattern} is there {count} times"
    return result


def _without(pattern: str, text: str) -> str:
    result, count = re.subn(pattern, "", text, flags=re.MULTILINE)
    assert count, f"{pattern} is not there"
    return result


def _text(address: Address) -> str:
    return f"{address[0]}:{address[1]}"
