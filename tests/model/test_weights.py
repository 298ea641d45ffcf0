"""How the files of a model are read while they are packed."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from tlserve.model import weights
from tlserve.model.checkpoint import open_checkpoint

TINY_LLAMA = Path(__file__).parents[2] / "fixtures" / "tiny-llama"

ASKED, GIVEN_BACK = "MADV_WILLNEED", "MADV_DONTNEED"


def test_the_system_is_asked_for_what_is_packed_next_and_gets_back_what_has_been_packed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    advised: list[tuple[str, int]] = []

    def advise(array: NDArray[np.uint8], advice: str) -> None:
        advised.append((advice, array.ctypes.data))

    monkeypatch.setattr(weights, "_STRETCH", 1)  # so that each has one tile
    monkeypatch.setattr(weights, "_AHEAD", 3)
    monkeypatch.setattr(weights, "_advise", advise)
    weights.load_weights(open_checkpoint(TINY_LLAMA), "auto", max_model_len=8, kv_number_bytes=2)

    asked, given_back = ([at for advice, at in advised if advice == which] for which in (ASKED, GIVEN_BACK))
    assert len(asked) > 20
    assert asked == given_back
    for number, at in enumerate(given_back):
        before = [advice for advice, _ in advised[: advised.index((GIVEN_BACK, at))]]
        assert before.count(ASKED) == min(number + 1 + 3, len(asked))


def test_advice_that_the_system_refuses_changes_nothing(tmp_path: Path) -> None:
    """Pages that a process has locked are not given back."""
    file = tmp_path / "numbers"
    file.write_bytes(bytes(mmap.PAGESIZE))
    with file.open("rb") as opened:
        array = np.frombuffer(mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
    libc = ctypes.CDLL(None, use_errno=True)
    address = ctypes.c_void_p(array.ctypes.data)
    assert libc.mlock(address, ctypes.c_size_t(array.nbytes)) == 0
    weights._advise(array, GIVEN_BACK)
    assert array.sum() == 0
    assert libc.munlock(address, ctypes.c_size_t(array.nbytes)) == 0
