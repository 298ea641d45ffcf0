"""An OpenAI-compatible model server in pure Python: fast on a CPU, the same bytes every time."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tlserve.config import EngineConfig, ServeConfig, SpeculativeConfig
    from tlserve.errors import ConfigError, EngineDied, ListenError, ModelError
    from tlserve.server import Server, run, serve
    from tlserve.server_thread import ServerHandle, spawn

__all__ = [
    "ConfigError",
    "EngineConfig",
    "EngineDied",
    "ListenError",
    "ModelError",
    "ServeConfig",
    "Server",
    "ServerHandle",
    "SpeculativeConfig",
    "run",
    "serve",
    "spawn",
]

# Imported when first asked for: a compiler comes with the server, and reading a configuration should not wait for it.
_HOMES = {
    "config": ("EngineConfig", "ServeConfig", "SpeculativeConfig"),
    "errors": ("ConfigError", "EngineDied", "ListenError", "ModelError"),
    "server": ("Server", "run", "serve"),
    "server_thread": ("ServerHandle", "spawn"),
}


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"tlserve.{home}"), name)
    raise AttributeError(f"module 'tlserve' has no attribute {name!r}")
