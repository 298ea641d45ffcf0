"""Where the work is done: a little at once, more in threads, so that nothing else waits for it."""

from __future__ import annotations

import threading

import pytest
import trio

from tests.openai.fakes import Api
from tlserve.errors import InvalidRequest
from tlserve.openai.service import INLINE_BYTES, LARGE_BYTES


async def test_little_work_is_done_at_once_and_more_in_a_thread() -> None:
    service = Api().service
    here = threading.get_ident()
    assert await service.off_loop(threading.get_ident, num_bytes=INLINE_BYTES) == here
    assert await service.off_loop(threading.get_ident, num_bytes=INLINE_BYTES + 1) != here
    assert await service.off_loop(threading.get_ident, num_bytes=1, may_inline=False) != here


async def test_work_in_a_thread_raises_what_it_raises() -> None:
    def refuse() -> None:
        raise InvalidRequest("no", param="p")

    with pytest.raises(InvalidRequest):
        await Api().service.off_loop(refuse, num_bytes=LARGE_BYTES + 1)


async def test_large_work_waits_for_large_work_and_nothing_waits_for_it() -> None:
    service = Api().service
    release = threading.Event()
    order: list[str] = []

    async def large(name: str) -> None:
        await service.off_loop(lambda: release.wait(10), num_bytes=LARGE_BYTES + 1)
        order.append(name)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(large, "first")
        nursery.start_soon(large, "second")
        await service.off_loop(lambda: None, num_bytes=LARGE_BYTES, may_inline=False)
        order.append("small")
        release.set()
    assert order[0] == "small"
    assert sorted(order[1:]) == ["first", "second"]


async def test_a_caller_that_is_cancelled_does_not_wait_for_its_thread() -> None:
    service = Api().service
    started, release = trio.Event(), threading.Event()
    token = trio.lowlevel.current_trio_token()

    def work() -> None:
        token.run_sync_soon(started.set)
        release.wait(10)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: service.off_loop(work, num_bytes=LARGE_BYTES))
        await started.wait()
        nursery.cancel_scope.cancel()
    assert not release.is_set()
    release.set()
