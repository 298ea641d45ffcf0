"""Threads that share the work of one program: stages, each cut into pieces that any thread may claim.

A program is a jitted function that every thread runs from its first stage to its last. In a stage it claims pieces
until none is left, then waits until all of them are finished:

    piece = claim(sync, stage, epoch, pieces, share)
    while piece >= 0:
        ...                                              # the work of this piece
        piece = finish(sync, stage, epoch, pieces, share, piece)     # this one is done; now the next
    if not wait_stage(sync, stage, epoch, pieces):
        return                                           # the others have gone on without this thread

The pieces of a stage are dealt out in SHARES ranges. A thread claims those of its own range in order, so that what it
needs next usually lies behind what it works on and can be fetched ahead; then it helps with the others.

Each run of the program is an epoch. The caller, thread 0, begins and ends it; helpers wait for the next:

    epoch = begin(sync)                                  epoch = np.int64(0)
    program(0, epoch, ...)                               while True:
    end(sync, epoch)                                         epoch = next_epoch(sync, epoch)
                                                             if epoch < 0:
                                                                 return
                                                             program(thread, epoch, ...)

Rule 1: a stage waits for its pieces, never for a thread: one that is late, or that the system has put aside, is missed
        only if it holds a piece. The caller can do everything alone.
Rule 2: a range's counter carries the epoch it counts for, so nothing has to be reset, and a thread that is late finds
        out that its epoch has passed. Then it claims nothing and leaves.
Rule 3: what decides which stages there are and how many pieces they have, a program copies to variables of its own, and
        after that asks ``is_current``; if not, it leaves. Everything else it reads within a piece, while holding it.
        The caller changes what programs read only between ``end`` and ``begin``.
Rule 4: waiting begins with a short spin and then gives the core away; between programs helpers sleep.
"""

# Numba types kernels; mypy sees their scalars as Any.
# mypy: disable-error-code="no-any-return, return-value, operator"
from __future__ import annotations

import platform
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numpy.typing import NDArray

from tlserve.kernels.emit import I32, I64, call, cgutils, instruction, memory
from tlserve.kernels.jit import entry, inline, jit

Sync = NDArray[np.int64]

SHARE_BITS = 2
SHARES = 1 << SHARE_BITS  # ranges of a stage's pieces, fewer than there may be threads: all look at each
LINE = 16  # int64 of two cache lines: the prefetcher fetches them in pairs
# Words of a Sync. EPOCH is 2 * epoch while it runs, and one more after it has ended.
EPOCH, CLOSED, SLEEPERS, FIRST_STAGE = 0, LINE, 2 * LINE, 3 * LINE
MAX_PIECES = 4095  # of a stage

# The word of a range of a stage: epoch << 24 | pieces claimed << 12 | pieces finished.
EPOCH_SHIFT, CLAIMED_SHIFT = 24, 12
COUNT = np.int64(MAX_PIECES)
ONE_CLAIMED, ONE_FINISHED = np.int64(1 << CLAIMED_SHIFT), np.int64(1)
PASSED, NO_PIECE = np.int64(-1), np.int64(-1)

STAGE_SPINS = 1000  # pauses, some 40 us: longer than a piece of a decode step takes
EPOCH_SPINS = 2000
EPOCH_YIELDS = 100


def new_sync(stages: int) -> Sync:
    """Counters for programs of up to so many stages, to be shared by their threads."""
    return np.zeros(FIRST_STAGE + stages * SHARES * LINE, np.int64)


# ---- an instruction or a call into the C library each ----


@memory(types.int64)
def atomic_load(b: Any, pointer: Any) -> Any:
    return b.load_atomic(pointer, "seq_cst", 8)


@memory(types.void, types.int64)
def atomic_store(b: Any, pointer: Any, value: Any) -> None:
    b.store_atomic(value, pointer, "seq_cst", 8)


@memory(types.int64, types.int64)
def atomic_add(b: Any, pointer: Any, value: Any) -> Any:
    """Gives the value before."""
    return b.atomic_rmw("add", pointer, value, "seq_cst")


@memory(types.boolean, types.int64, types.int64)
def compare_and_swap(b: Any, pointer: Any, expected: Any, value: Any) -> Any:
    """Whether the value was ``expected`` and is ``value`` now."""
    return b.extract_value(b.cmpxchg(pointer, expected, value, "seq_cst", "seq_cst"), 1)


@instruction(types.void)
def fence(b: Any) -> None:
    """No access to memory moves past here."""
    b.fence("seq_cst")


_IS_X86 = platform.machine() in ("x86_64", "AMD64")


@instruction(types.void)
def pause(b: Any) -> None:
    """Tells the core that this is a waiting loop."""
    if _IS_X86:
        call(b, "llvm.x86.sse2.pause", ir.VoidType())
    elif platform.machine() in ("aarch64", "arm64"):
        call(b, "llvm.aarch64.hint", ir.VoidType(), ir.Constant(I32, 1))


@instruction(types.void)
def give_way(b: Any) -> None:
    """Lets another thread have the core."""
    call(b, "sched_yield", I32)


_FUTEX_CALL = {"x86_64": 202, "aarch64": 98}.get(platform.machine()) if sys.platform == "linux" else None
_WAIT, _WAKE = 128, 129  # private to the process
_NAP = 200  # microseconds, where there is no futex
_EVERYONE = 0x7FFFFFFF


def _futex(b: Any, pointer: Any, operation: int, value: Any) -> None:
    # The low half of the word: all of these machines are little-endian.
    arguments = [I64, I64, I64, I64, I64, I64, I64]
    syscall = cgutils.get_or_insert_function(b.module, ir.FunctionType(I64, arguments[:1], var_arg=True), "syscall")
    zero = ir.Constant(I64, 0)
    operands = [ir.Constant(I64, _FUTEX_CALL), b.ptrtoint(pointer, I64), ir.Constant(I64, operation), value, zero]
    b.call(syscall, operands)


@memory(types.void, types.int64)
def sleep_while(b: Any, pointer: Any, value: Any) -> None:
    """Sleeps until woken, if the word still has this value; may also return for no reason."""
    if _FUTEX_CALL is None:
        call(b, "usleep", I32, ir.Constant(I32, _NAP))
    else:
        _futex(b, pointer, _WAIT, value)


@memory(types.void)
def wake(b: Any, pointer: Any) -> None:
    """Wakes all that sleep on the word."""
    if _FUTEX_CALL is not None:
        _futex(b, pointer, _WAKE, ir.Constant(I64, _EVERYONE))


# ---- stages ----


@inline
def first_of(share: int, pieces: int) -> int:
    """Where a range of the pieces begins, and the one before it ends."""
    return pieces * share >> SHARE_BITS


@inline
def share_of(thread: int, threads: int) -> int:
    """The range that a thread begins with."""
    return thread * SHARES // threads if threads <= SHARES else thread % SHARES


@inline
def _word(stage: int, share: int) -> int:
    return FIRST_STAGE + (stage * SHARES + share) * LINE


@inline
def _claim_of(sync: Sync, word: int, epoch: int, count: int) -> int:
    """A piece of one range, 0..count - 1; -1 when none is left."""
    while count > 0:
        seen = atomic_load(sync, word)
        if seen >> EPOCH_SHIFT < epoch:
            if compare_and_swap(sync, word, seen, epoch << EPOCH_SHIFT | ONE_CLAIMED):
                return np.int64(0)
            continue
        piece = seen >> CLAIMED_SHIFT & COUNT
        if seen >> EPOCH_SHIFT > epoch or piece >= count:
            return NO_PIECE
        if compare_and_swap(sync, word, seen, seen + ONE_CLAIMED):
            return piece
    return NO_PIECE


@inline
def claim(sync: Sync, stage: int, epoch: int, pieces: int, share: int) -> int:
    """A piece of the stage, 0..pieces - 1, for this thread alone, of this range if it has any left; else -1."""
    for turn in range(SHARES):
        other = (share + turn) % SHARES
        first = first_of(other, pieces)
        piece = _claim_of(sync, _word(stage, other), epoch, first_of(other + 1, pieces) - first)
        if piece >= 0:
            return first + piece
    return NO_PIECE


@inline
def finish(sync: Sync, stage: int, epoch: int, pieces: int, share: int, done: int) -> int:
    """Marks a claimed piece as done and claims another, if it can the next in one step; -1 when none is left."""
    while not first_of(share, pieces) <= done < first_of(share + 1, pieces):
        share = (share + 1) % SHARES
    first, word = first_of(share, pieces), _word(stage, share)
    count = first_of(share + 1, pieces) - first
    while True:
        # A range with an unfinished piece is of this epoch.
        seen = atomic_load(sync, word)
        piece = seen >> CLAIMED_SHIFT & COUNT
        if piece < count:
            if compare_and_swap(sync, word, seen, seen + ONE_CLAIMED + ONE_FINISHED):
                return first + piece
        elif compare_and_swap(sync, word, seen, seen + ONE_FINISHED):
            return claim(sync, stage, epoch, pieces, share)


@inline
def wait_stage(sync: Sync, stage: int, epoch: int, pieces: int) -> bool:
    """Waits until every piece is done; False at once when the epoch has passed: then leave the program.

    To be called after ``claim`` or ``finish`` has said that no piece is left.
    """
    spins = 0
    for share in range(SHARES):
        count = first_of(share + 1, pieces) - first_of(share, pieces)
        done = epoch << EPOCH_SHIFT | count << CLAIMED_SHIFT | count
        while count > 0:
            seen = atomic_load(sync, _word(stage, share))
            if seen == done:
                break
            if seen >> EPOCH_SHIFT > epoch:
                return False
            spins += 1
            if spins < STAGE_SPINS:
                pause()
            else:
                give_way()
    return True


# ---- epochs ----


@jit
def begin(sync: Sync) -> int:
    """Begins the next epoch and wakes the helpers."""
    epoch = (atomic_load(sync, EPOCH) >> 1) + 1
    atomic_store(sync, EPOCH, epoch << 1)
    if atomic_load(sync, SLEEPERS) > 0:
        wake(sync, EPOCH)
    return epoch


@jit
def end(sync: Sync, epoch: int) -> None:
    """Ends the epoch, all of whose stages are done; after it the caller may change what programs read."""
    atomic_store(sync, EPOCH, epoch << 1 | 1)
    fence()


@inline
def is_current(sync: Sync, epoch: int) -> bool:
    """Whether what was read before this call belongs to the epoch."""
    fence()
    return atomic_load(sync, EPOCH) == epoch << 1


@jit
def next_epoch(sync: Sync, seen: int) -> int:
    """Waits for an epoch later than ``seen`` that is running, and gives it; -1 when the team has closed."""
    waits = 0
    while True:
        if atomic_load(sync, CLOSED) != 0:
            return PASSED
        word = atomic_load(sync, EPOCH)
        if word >> 1 > seen and word & 1 == 0:
            return word >> 1
        waits += 1
        if waits < EPOCH_SPINS:
            pause()
        elif waits < EPOCH_SPINS + EPOCH_YIELDS:
            give_way()
        else:
            atomic_add(sync, SLEEPERS, np.int64(1))
            sleep_while(sync, EPOCH, word)
            atomic_add(sync, SLEEPERS, np.int64(-1))


@entry("void(i8[::1])")
def _close(sync: Sync) -> None:
    """Makes ``next_epoch`` give -1 from now on."""
    atomic_store(sync, CLOSED, np.int64(1))
    # The word that sleepers watch has to change, or one that is about to sleep would miss the call.
    atomic_store(sync, EPOCH, ((atomic_load(sync, EPOCH) >> 1) + 1) << 1 | 1)
    wake(sync, EPOCH)


class Team:
    """The helper threads of programs that share a Sync; thread 0 is whoever runs a program."""

    def __init__(self, sync: Sync, threads: int, run: Callable[[int], None]) -> None:
        """Starts threads 1..threads - 1; ``run(thread)`` releases the GIL and returns once ``next_epoch`` gives -1."""
        self._sync = sync
        # Daemons: a program that fails before ``close`` ends, instead of waiting for threads that wait for it.
        self._helpers = [
            threading.Thread(target=run, args=(thread,), name=f"tlserve-compute-{thread}", daemon=True)
            for thread in range(1, threads)
        ]
        for helper in self._helpers:
            helper.start()

    def close(self) -> None:
        """Ends the helpers and waits for them; no program may be running. Idempotent."""
        _close(self._sync)
        for helper in self._helpers:
            helper.join()
        self._helpers = []
