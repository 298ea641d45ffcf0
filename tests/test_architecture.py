"""Who may import whom, and which library belongs to which room, read from the imports themselves."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "tlserve"
MODULES = sorted(PACKAGE.rglob("*.py"))

LEAVES = {"config", "data", "errors", "metrics", "regular_file"}
# Each room and the rooms it may import besides itself and the leaves.
MAY_IMPORT = {
    "__init__": {"server", "server_thread", "config"},
    "__main__": {"cli"},
    "cli": {
        "server",
        "server_thread",
        "loading",
        "overview",
        "log",
        "openai",
        "http",
        "text",
        "engine",
        "model",
        "kernels",
        "conform",
    },
    "conform": {"http"},
    "server": {
        "health",
        "tracing",
        "loading",
        "overview",
        "log",
        "openai",
        "http",
        "text",
        "engine",
        "model",
        "kernels",
    },
    "server_thread": {"server", "loading"},
    "loading": {"overview", "log", "openai", "text", "engine", "model", "kernels"},
    "overview": {"text", "model", "kernels"},
    "health": {"http"},
    "tracing": {"http", "log"},
    "pytest_plugin": {"server_thread"},
    "log": {"http"},
    "openai": {"http", "text", "engine"},
    "http": set(),
    "text": set(),
    "engine": {"model", "kernels"},
    "model": {"kernels"},
    "kernels": set(),
} | {leaf: set() for leaf in LEAVES}
# Each library and the places that may import it, as module name prefixes.
OWNERS = {
    "h11": {"http"},
    "numba": {"kernels"},
    "llvmlite": {"kernels"},
    "trio": {"engine.loop", "http", "openai", "server", "server_thread", "health", "tracing", "cli", "conform"},
    "msgspec": {"openai", "config", "model", "text", "http", "cli.replies"},
    "jinja2": {"text"},
    "tokenizers": {"text"},
    "prometheus_client": {"metrics"},
    "opentelemetry": {"tracing"},
    "pytest": {"pytest_plugin"},
}


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def imported(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            names |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_imports_go_down_only(path: Path) -> None:
    room = module_name(path).split(".")[0]
    rooms = {name.split(".")[1] for name in imported(path) if name.startswith("tlserve.") and name.count(".") >= 1}
    known = {name for name in rooms if (PACKAGE / name).is_dir() or (PACKAGE / f"{name}.py").is_file()}
    assert known <= MAY_IMPORT[room] | LEAVES | {room}


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_each_library_has_an_owner(path: Path) -> None:
    name = module_name(path)
    for library in {item.split(".")[0] for item in imported(path)} & OWNERS.keys():
        owners = OWNERS[library]
        assert any(name == owner or name.startswith(f"{owner}.") for owner in owners), f"{name} imports {library}"
