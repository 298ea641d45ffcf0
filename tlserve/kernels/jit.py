"""How kernels are compiled: one set of options, one choice of instruction set, one cache.

Rule 1: no option that lets the compiler reorder or contract float operations; a kernel's bits are its source's.
Rule 2: entries (which Python calls) and leaves (which kernels call through their address) are compiled once and
        cached. What they call is compiled into them, so the cache key covers every source of this package, not just
        their own file as numba's key does.
Rule 3: kernels own no memory. They are given every array, scratch too, and count no references to them: counting is
        atomic, and cost a fifth of a step.
Rule 4: a cache that cannot be read or written costs time, never correctness: one warning, then none.

``TLSERVE_ISA`` forces avx512, avx2 or portable; ``TLSERVE_CACHE_DIR`` moves the cache (default:
``$XDG_CACHE_HOME/tlserve``, else ``~/.cache/tlserve``). The choice is made when this module is imported, before
numba fixes its own target.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import pickle
import platform
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

import llvmlite
import llvmlite.binding
import numba
import numba.core.config
from numba.core import ccallback, compiler, serialize, sigutils
from numba.core.caching import _Cache

from tlserve.errors import ConfigError

logger = logging.getLogger(__name__)

Function = TypeVar("Function", bound=Callable[..., Any])

ISAS = ("avx512", "avx2", "portable")
NEEDS = {
    "avx512": {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512vnni"},
    "avx2": {"avx2", "fma", "f16c"},
    "portable": set[str](),
}
# What a forced ISA below the CPU's own is compiled for, so that it is what such a machine would run.
STAND_INS = {"avx2": "haswell", "portable": "x86-64"}


@dataclass(frozen=True)
class Target:
    """What kernels are compiled for."""

    isa: str  # one of ISAS
    cpu: str  # LLVM's name
    features: frozenset[str]  # LLVM's names of what the CPU has


def choose_target(forced: str | None, cpu: str, features: frozenset[str]) -> Target:
    """The best ISA this CPU has, or the forced one; raises ConfigError for one it lacks or that does not exist."""
    best = next(isa for isa in ISAS if NEEDS[isa] <= features)
    if not forced or forced == best:
        return Target(best, cpu, features)
    if forced not in ISAS:
        raise ConfigError(f"TLSERVE_ISA must be one of {', '.join(ISAS)}, got {forced!r}")
    missing = sorted(NEEDS[forced] - features)
    if missing:
        raise ConfigError(f"TLSERVE_ISA={forced}: this CPU ({cpu}) lacks {', '.join(missing)}")
    return Target(forced, STAND_INS[forced], frozenset(NEEDS[forced]))


def _host() -> tuple[str, frozenset[str]]:
    features = llvmlite.binding.get_host_cpu_features()
    return llvmlite.binding.get_host_cpu_name(), frozenset(name for name, present in features.items() if present)


def _apply(target: Target, host: str) -> Target:
    if target.cpu != host:
        settings: Any = numba.core.config
        settings.CPU_NAME = target.cpu
        settings.CPU_FEATURES = ""
    return target


TARGET = _apply(choose_target(os.environ.get("TLSERVE_ISA"), *_host()), _host()[0])


def cache_root() -> Path:
    """Where compiled kernels are kept, whatever their key."""
    if chosen := os.environ.get("TLSERVE_CACHE_DIR"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tlserve"


def cache_key() -> str:
    """Changes with every source of this package, the compiler, and the CPU that code is made for."""
    digest = hashlib.sha256()
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    versions = (sys.version, numba.__version__, llvmlite.__version__, platform.machine())
    digest.update(repr((versions, TARGET.isa, TARGET.cpu, sorted(TARGET.features))).encode())
    return digest.hexdigest()[:20]


class CacheDirectory:
    """Files of bytes by key. Each is written whole under its final name, so processes never see half of one.

    After the first failure it forgets what it is given and finds nothing.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._usable = True

    def load(self, key: str) -> bytes | None:
        """What was saved under key, or None when it was not, or is damaged."""
        if not self._usable:
            return None
        try:
            self._check_owner()
            stored = (self.path / key).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            self._give_up("read", error)
            return None
        digest, data = stored[:32], stored[32:]
        return data if hashlib.sha256(data).digest() == digest else None

    def save(self, key: str, data: bytes) -> None:
        if not self._usable:
            return
        part = self.path / f"{key}.{uuid.uuid4().hex[:8]}"
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._check_owner()
            part.write_bytes(hashlib.sha256(data).digest() + data)
            part.replace(self.path / key)
        except OSError as error:
            self._give_up("written", error)
            with contextlib.suppress(OSError):
                part.unlink()

    def _check_owner(self) -> None:
        """What is loaded from here is run, so nobody else may have put it here."""
        if hasattr(os, "getuid") and self.path.stat().st_uid != os.getuid():
            raise PermissionError(f"{self.path} belongs to another user")

    def _give_up(self, what: str, error: OSError) -> None:
        self._usable = False
        logger.warning("kernel cache cannot be %s, kernels are compiled at each start: %s", what, error)


class KernelCache(_Cache):
    """The cache of one entry point: a file for each signature."""

    def __init__(self, directory: CacheDirectory, name: str) -> None:
        self._directory = directory
        self._name = name

    @property
    def cache_path(self) -> str:
        return str(self._directory.path)

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """The compiled code for a signature (numba calls this before it compiles), or None."""
        target_context.refresh()
        data = self._directory.load(self._file(sig))
        result: Any = compiler.CompileResult
        return None if data is None else result._rebuild(target_context, *pickle.loads(data))

    def save_overload(self, sig: Any, data: Any) -> None:
        if data.library.has_dynamic_globals:
            raise AssertionError(f"{self._name} holds an address of this process and cannot be cached")
        pickler: Any = serialize
        self._directory.save(self._file(sig), pickler.dumps(data._reduce()))

    def enable(self) -> None:
        """Always enabled."""

    def disable(self) -> None:
        """Always enabled."""

    def flush(self) -> None:
        """Entries are never stale: their directory is named for the sources."""

    def _file(self, sig: Any) -> str:
        return f"{self._name}-{hashlib.sha256(str(sig).encode()).hexdigest()[:12]}"


_DIRECTORY = CacheDirectory(cache_root() / cache_key())
_ENTRIES: list[Compiled] = []
OPTIONS: Mapping[str, Any] = {"nogil": True, "error_model": "numpy", "_nrt": False}


def jit(function: Function) -> Function:
    """A building block of kernels: compiled into its callers, and on its own when Python calls it (as tests do)."""
    compiled: Any = numba.njit(**OPTIONS)(function)
    return cast(Function, compiled)


def inline(function: Function) -> Function:
    """A building block small or hot enough that a call to it is never wanted."""
    compiled: Any = numba.njit(**OPTIONS, forceinline=True)(function)
    return cast(Function, compiled)


class Compiled(Protocol):
    """What is compiled on its own, and cached."""

    name: str

    def compile(self) -> None:
        """Makes it ready to run, from the cache or by compiling it."""


class Entry:
    """A kernel that Python calls; it has one numba signature."""

    def __init__(self, name: str, function: Callable[..., Any], signature: Any) -> None:
        self.name = name
        made: Any = jit(function)
        self.dispatcher = made
        self.dispatcher._cache = KernelCache(_DIRECTORY, name)
        self._signature = signature

    def compile(self) -> None:
        self.dispatcher.compile(self._signature)


class Leaf:
    """A kernel that other kernels call through its address, so that it is not compiled into each of them."""

    def __init__(self, name: str, function: Callable[..., Any], signature: Any) -> None:
        self.name = name
        make: Any = ccallback.CFunc
        parse: Any = sigutils.normalize_signature
        self._compiled: Any = make(function, parse(signature), {}, OPTIONS)
        self._compiled._cache = KernelCache(_DIRECTORY, name)

    def compile(self) -> None:
        if self._compiled.address is None:
            self._compiled.compile()

    @property
    def address(self) -> int:
        """Of a C function with the arguments of the signature."""
        self.compile()
        address: int = self._compiled.address
        return address


def entry(signature: Any) -> Callable[[Function], Function]:
    """A kernel that Python calls: cached on disk, compiled for this one numba signature by ``compile_all``."""

    def define(function: Function) -> Function:
        made = Entry(f"{function.__module__.rpartition('.')[2]}.{function.__qualname__}", function, signature)
        _ENTRIES.append(made)
        return cast(Function, made.dispatcher)

    return define


def compile_all(
    leaves: Sequence[Compiled] = (), progress: Callable[[int, int, str], None] = lambda done, total, name: None
) -> None:
    """Makes every entry point and these leaves ready to run, from the cache or by compiling them.

    ``progress(done, total, name)`` is called before each one, and with an empty name at the end.
    """
    everything = [*leaves, *_ENTRIES]
    for done, compiled in enumerate(everything):
        progress(done, len(everything), compiled.name)
        compiled.compile()
    progress(len(everything), len(everything), "")
