"""Programs of stages and pieces: nothing lost, nothing done twice, nothing left running."""

# Numba types kernels; mypy sees their scalars as Any.
# mypy: disable-error-code="assignment, arg-type"
from __future__ import annotations

import threading

import numpy as np
import pytest
from numpy.typing import NDArray

from tlserve.kernels.jit import jit
from tlserve.kernels.threads import (
    SHARES,
    Sync,
    Team,
    begin,
    claim,
    end,
    finish,
    is_current,
    new_sync,
    next_epoch,
    share_of,
    wait_stage,
)

Ints = NDArray[np.int64]
STAGES, PIECES = 20, 50


@jit
def _program(epoch: int, share: int, sync: Sync, sizes: Ints, out: Ints) -> None:
    """Each piece of a stage writes one more than the largest that the stage before has written, and counts itself."""
    stages, pieces = sizes[0], sizes[1]
    if not is_current(sync, epoch):
        return
    for stage in range(stages):
        piece = claim(sync, stage, epoch, pieces, share)
        while piece >= 0:
            out[stage, piece, 0] = epoch
            for before in range(pieces if stage > 0 else 0):
                out[stage, piece, 0] = max(out[stage, piece, 0], out[stage - 1, before, 0] + 1)
            out[stage, piece, 1] += 1
            piece = finish(sync, stage, epoch, pieces, share, piece)
        if not wait_stage(sync, stage, epoch, pieces):
            return


@jit
def _run(thread: int, sync: Sync, sizes: Ints, out: Ints) -> None:
    if thread == 0:
        epoch = begin(sync)
        _program(epoch, thread % SHARES, sync, sizes, out)
        end(sync, epoch)
        return
    epoch = np.int64(0)
    while True:
        epoch = next_epoch(sync, epoch)
        if epoch < 0:
            return
        _program(epoch, thread % SHARES, sync, sizes, out)


def _check_epoch(sync: Sync, sizes: Ints, out: Ints, stages: int, pieces: int) -> None:
    out[:] = 0
    sizes[:] = stages, pieces
    _run(0, sync, sizes, out)
    written = out[:stages, :pieces]
    first = sync[0] >> 1
    assert (written[..., 0] == first + np.arange(stages)[:, np.newaxis]).all()
    assert (written[..., 1] == 1).all()
    assert not out[stages:].any()
    assert not out[:, pieces:].any()


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_every_piece_is_done_once_and_after_the_stage_before(threads: int) -> None:
    """Hundreds of epochs of changing shape, on more threads than there may be cores."""
    sync, sizes = new_sync(STAGES), np.zeros(2, np.int64)
    out = np.zeros((STAGES, PIECES, 2), np.int64)
    team = Team(sync, threads, lambda thread: _run(thread, sync, sizes, out))
    rng = np.random.default_rng(threads)
    try:
        for _ in range(300):
            _check_epoch(sync, sizes, out, int(rng.integers(0, STAGES + 1)), int(rng.integers(0, PIECES + 1)))
    finally:
        team.close()


@jit
def _claims(sync: Sync, share: int, pieces: int, order: Ints) -> None:
    epoch = begin(sync)
    piece, i = claim(sync, 0, epoch, pieces, share), 0
    while piece >= 0:
        order[i] = piece
        i += 1
        piece = finish(sync, 0, epoch, pieces, share, piece)
    wait_stage(sync, 0, epoch, pieces)
    end(sync, epoch)


@pytest.mark.parametrize(
    ("share", "pieces", "expected"),
    [
        (0, 8, [0, 1, 2, 3, 4, 5, 6, 7]),
        (2, 8, [4, 5, 6, 7, 0, 1, 2, 3]),
        (1, 7, [1, 2, 3, 4, 5, 6, 0]),
        (3, 2, [1, 0]),
        (1, 1, [0]),
        (2, 0, []),
    ],
)
def test_a_thread_takes_its_own_range_in_order_and_then_the_others(
    share: int, pieces: int, expected: list[int]
) -> None:
    order = np.full(len(expected), -1, np.int64)
    _claims(new_sync(1), share, pieces, order)
    assert order.tolist() == expected


@pytest.mark.parametrize("threads", [1, 2, 3, 4, 6])
def test_threads_begin_in_ranges_that_are_far_apart(threads: int) -> None:
    shares = [share_of(thread, threads) for thread in range(threads)]
    assert shares == {1: [0], 2: [0, 2], 3: [0, 1, 2], 4: [0, 1, 2, 3], 6: [0, 1, 2, 3, 0, 1]}[threads]


def test_stages_do_not_wait_for_a_thread_that_holds_no_piece() -> None:
    """A team whose helper never comes."""
    sync, sizes = new_sync(STAGES), np.zeros(2, np.int64)
    out = np.zeros((STAGES, PIECES, 2), np.int64)
    for _ in range(3):
        _check_epoch(sync, sizes, out, STAGES, PIECES)


def test_a_thread_of_a_past_epoch_claims_nothing_and_leaves() -> None:
    sync, sizes = new_sync(STAGES), np.array([3, 4])
    out = np.zeros((STAGES, PIECES, 2), np.int64)
    _run(0, sync, sizes, out)
    _run(0, sync, sizes, out)
    before, counters = out.copy(), sync.copy()
    sizes[:] = STAGES, PIECES  # what a later program will find
    for epoch in (1, 2):
        _program(epoch, 0, sync, sizes, out)
    np.testing.assert_array_equal(out, before)
    np.testing.assert_array_equal(sync, counters)


@jit
def _stages_of_a_late_thread(sync: Sync, epoch: int) -> tuple[int, bool]:
    return claim(sync, 0, epoch, 4, 1), wait_stage(sync, 0, epoch, 4)


def test_a_thread_that_is_overtaken_inside_a_program_finds_no_piece() -> None:
    """It has looked at the sizes in time, and is put aside until another epoch is under way."""
    sync, sizes = new_sync(STAGES), np.array([3, 4])
    out = np.zeros((STAGES, PIECES, 2), np.int64)
    _run(0, sync, sizes, out)
    assert _stages_of_a_late_thread(sync, 1) == (-1, True)
    _run(0, sync, sizes, out)
    assert _stages_of_a_late_thread(sync, 1) == (-1, False)


@jit
def _wait(sync: Sync) -> int:
    return next_epoch(sync, np.int64(0))


def test_closing_ends_helpers_and_may_be_repeated() -> None:
    sync = new_sync(1)
    results = []
    team = Team(sync, 3, lambda thread: results.append(_wait(sync)))
    team.close()
    team.close()
    assert results == [-1, -1]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("tlserve-compute")]
