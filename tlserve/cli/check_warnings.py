"""What a server starts with although its operator may not have meant it."""

from __future__ import annotations

import ipaddress
import os
import resource
import stat
from collections.abc import Iterator
from pathlib import Path

from tlserve.cli.process import needed_files
from tlserve.config import ServeConfig, parse_listen
from tlserve.overview import Overview


def warnings_of(config: ServeConfig, view: Overview) -> list[str]:
    """One line each, naming the key and the value."""
    return [*_of_memory(config, view), *_of_access(config), *_of_machine(config)]


def _of_memory(config: ServeConfig, view: Overview) -> Iterator[str]:
    asked = config.engine.max_model_len or view.model_context
    if view.max_model_len < asked:
        yield f"max_model_len = {asked}: the KV cache holds {view.max_model_len} tokens; a longer request is refused"
    if view.num_blocks < view.max_num_seqs:
        yield f"max_num_seqs = {view.max_num_seqs}: {view.num_blocks} KV blocks hold that many requests at most"


def _of_access(config: ServeConfig) -> Iterator[str]:
    is_open = not _is_loopback(config.http_listen)
    if is_open and config.api_keys_file is None:
        yield f"http_listen = {config.http_listen!r}: other machines can reach it, and no api_keys_file is set"
    if is_open and config.api_keys_file is not None and config.tls_cert is None:
        yield f"http_listen = {config.http_listen!r}: API keys are sent in the clear, for tls_cert is not set"
    for key in ("api_keys_file", "tls_key"):
        path: Path | None = getattr(config, key)
        if path is not None and path.stat().st_mode & (stat.S_IROTH | stat.S_IWOTH):
            yield f"{key} = {str(path)!r}: every user of this machine can read or change it"


def _of_machine(config: ServeConfig) -> Iterator[str]:
    num_cores = len(os.sched_getaffinity(0))
    if config.engine.num_threads > num_cores:
        yield f"threads = {config.engine.num_threads}: this process has {num_cores} cores"
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and needed_files(config.max_connections) > hard:
        yield f"max_connections = {config.max_connections}: the limit of open files is {hard}"


def _is_loopback(listen: str) -> bool:
    host, _ = parse_listen(listen, "http_listen")
    if host is None:
        return False
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
