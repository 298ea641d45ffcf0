from __future__ import annotations

import math
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing

from tests.engine import reference_sampler
from tests.engine.harness import greedy
from tests.fakes import ScriptedModel
from tlserve.config import EngineConfig
from tlserve.engine.engine import Engine
from tlserve.engine.loop import EngineLoop, Generation
from tlserve.engine.request import FinishReason, GenRequest, PooledOut, TokenOut
from tlserve.errors import ContextLengthExceeded, InternalFault, InvalidRequest, NoCapacity, Overloaded, ShuttingDown
from tlserve.model.batch import Batch, ForwardOutput

COUNT_UP = {token: (token + 1) % 16 for token in range(16)}


class FailingModel(ScriptedModel):
    """Works for two steps."""

    def forward(self, batch: Batch) -> ForwardOutput:
        if len(self.batches) == 2:
            raise ZeroDivisionError("a bug of ours")
        return super().forward(batch)


class GatedModel(ScriptedModel):
    """Each step waits until the test lets it through."""

    def __init__(self, *, script: dict[int, int] | None = None) -> None:
        super().__init__(script=script)
        self._begun = threading.Semaphore(0)
        self._gate = threading.Semaphore(0)

    def open_gate(self, num_steps: int) -> None:
        self._gate.release(num_steps)

    async def wait_begun(self) -> None:
        """Return when one more step has begun."""
        assert await trio.to_thread.run_sync(lambda: self._begun.acquire(timeout=10))

    def forward(self, batch: Batch) -> ForwardOutput:
        self._begun.release()
        assert self._gate.acquire(timeout=10)
        return super().forward(batch)


def new_loop(
    model: ScriptedModel | None = None,
    *,
    max_waiting: int = 8,
    max_num_seqs: int = 4,
    queue_deadline: float = math.inf,
    step_delay: float = 1.0,
    in_thread: bool = False,
    on_step: Callable[[float], None] = lambda seconds: None,
) -> EngineLoop:
    config = EngineConfig(prefix_cache="off", max_num_seqs=max_num_seqs, prefill_chunk=4)
    engine = Engine(
        model or ScriptedModel(script=COUNT_UP), config, max_waiting=max_waiting, sample=reference_sampler.sample
    )
    return EngineLoop(
        engine, queue_deadline=queue_deadline, step_delay=step_delay, in_thread=in_thread, on_step=on_step
    )


@asynccontextmanager
async def running(loop: EngineLoop) -> AsyncIterator[EngineLoop]:
    async with trio.open_nursery() as nursery:
        await nursery.start(_run, loop)
        yield loop
        loop.stop()


async def _run(loop: EngineLoop, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
    await loop.run(task_status=task_status)


async def tokens_of(generation: Generation) -> list[int]:
    return [output.token async for _, output in generation if isinstance(output, TokenOut)]


async def finish(loop: EngineLoop, request: GenRequest) -> list[int]:
    async with loop.submit([request]) as generation:
        return await tokens_of(generation)


async def started(call: Callable[[], Awaitable[object]], nursery: trio.Nursery) -> None:
    """Start a task and let everything happen that can happen without waiting for the clock."""

    async def ignore_result() -> None:
        await call()

    nursery.start_soon(ignore_result)
    await trio.testing.wait_all_tasks_blocked()


async def test_outputs_come_as_they_are_drawn(autojump_clock: trio.testing.MockClock) -> None:
    async with running(new_loop()) as loop, loop.submit([greedy([1], 3)]) as generation:
        times = [(output.finish, trio.current_time()) async for _, output in generation]
    assert [finish for finish, _ in times] == [None, None, FinishReason.LENGTH]
    assert [time - times[0][1] for _, time in times] == [0, 1, 2]


async def test_a_submission_of_several_names_the_place_of_each(autojump_clock: trio.testing.MockClock) -> None:
    async with running(new_loop()) as loop:
        requests = [greedy([1], 2), GenRequest((5,), 0, is_pooling=True), greedy([7], 3)]
        async with loop.submit(requests) as generation:
            outputs = [(index, output) async for index, output in generation]
    assert [output.token for index, output in outputs if isinstance(output, TokenOut) and index == 0] == [2, 3]
    assert [output.token for index, output in outputs if isinstance(output, TokenOut) and index == 2] == [8, 9, 10]
    assert [index for index, output in outputs if isinstance(output, PooledOut)] == [1]


async def test_a_generation_knows_how_long_it_was_queued() -> None:
    """Until its turn comes it does not; then the steps of the one before it are part of the time."""
    model = GatedModel(script=COUNT_UP)
    async with (
        running(new_loop(model, max_num_seqs=1, in_thread=True, step_delay=0)) as loop,
        loop.submit([greedy([1], 2)]) as first,
        loop.submit([greedy([5], 1)]) as second,
    ):
        await model.wait_begun()
        assert (first.queue_time, second.queue_time) == (None, None)
        model.open_gate(3)
        assert await tokens_of(first) == [2, 3]
        assert first.queue_time is not None
        assert await tokens_of(second) == [6]
        assert second.queue_time is not None
        assert 0 <= first.queue_time < second.queue_time


@pytest.mark.parametrize("in_thread", [False, True])
async def test_each_step_is_told_of_once_in_the_event_loop(in_thread: bool) -> None:
    told: list[float] = []
    threads: set[threading.Thread] = set()

    def on_step(seconds: float) -> None:
        told.append(seconds)
        threads.add(threading.current_thread())

    model = ScriptedModel(script=COUNT_UP)
    async with running(new_loop(model, in_thread=in_thread, step_delay=0, on_step=on_step)) as loop:
        assert await finish(loop, greedy([1], 3)) == [2, 3, 4]
        await loop.wait_idle()
    assert len(told) == len(model.batches) == 3
    assert min(told) > 0
    assert threads == {threading.main_thread()}


async def test_steps_in_a_thread_give_the_same(autojump_clock: trio.testing.MockClock) -> None:
    threads = set()

    class Model(ScriptedModel):
        def forward(self, batch: Batch) -> ForwardOutput:
            threads.add(threading.current_thread())
            return super().forward(batch)

    async with running(new_loop(Model(script=COUNT_UP), in_thread=True, step_delay=0)) as loop:
        assert await finish(loop, greedy([1], 3)) == [2, 3, 4]
    assert threading.main_thread() not in threads


async def test_a_note_ends_a_run_of_steps_at_the_next_boundary() -> None:
    """Steps follow each other in their thread; a client that leaves, and one that comes, are seen between two."""
    model = GatedModel(script=COUNT_UP)
    async with running(new_loop(model, in_thread=True, step_delay=0)) as loop:
        async with loop.submit([greedy([1], 60)]) as generation:
            model.open_gate(2)
            for _ in range(3):
                await model.wait_begun()
            assert [(await anext(generation))[1].finish for _ in range(2)] == [None, None]
        model.open_gate(1)
        await loop.wait_idle()
        assert len(model.batches) == 3
        model.open_gate(2)
        assert await finish(loop, greedy([1], 2)) == [2, 3]
        await loop.wait_idle()
        assert loop.stats().num_blocks_used == 0


async def test_a_step_that_fails_in_its_thread_comes_after_what_the_steps_before_it_brought() -> None:
    loop = new_loop(FailingModel(script=COUNT_UP), in_thread=True, step_delay=0)

    async def die() -> None:
        with pytest.raises(ZeroDivisionError):
            await loop.run()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(die)
        async with loop.submit([greedy([1], 9)]) as generation:
            tokens = [await anext(generation), await anext(generation)]
            with pytest.raises(InternalFault):
                await anext(generation)
    assert len(tokens) == 2


async def test_cancelling_waits_for_the_step_and_not_for_the_work(autojump_clock: trio.testing.MockClock) -> None:
    model = GatedModel()
    loop = new_loop(model, in_thread=True, step_delay=0)
    async with trio.open_nursery() as nursery, loop.submit([greedy([1], 100)]):
        nursery.start_soon(loop.run)
        await model.wait_begun()
        nursery.cancel_scope.cancel()
        loop.stop()
        model.open_gate(1)
    assert len(model.batches) == 1


async def test_a_reader_that_never_reads_stalls_nobody(autojump_clock: trio.testing.MockClock) -> None:
    async with running(new_loop()) as loop, loop.submit([greedy([1], 50)]) as unread:
        assert await finish(loop, greedy([3], 9)) == [4, 5, 6, 7, 8, 9, 10, 11, 12]
        await loop.wait_idle()
        assert len(await tokens_of(unread)) == 50


async def test_the_queue_is_bounded_together_with_what_is_on_its_way(autojump_clock: trio.testing.MockClock) -> None:
    """A burst between two steps counts against the same places."""
    loop = new_loop(max_waiting=2, max_num_seqs=1)
    async with running(loop), trio.open_nursery() as nursery:
        results: list[object] = []

        async def one() -> None:
            try:
                results.append(await finish(loop, greedy([1], 2)))
            except Overloaded as error:
                results.append(error.status)

        for _ in range(10):
            nursery.start_soon(one)
        await trio.testing.wait_all_tasks_blocked()
        assert results == [429] * 7  # one runs, two wait
        assert loop.num_in_flight == 3
    assert results == [429] * 7 + [[2, 3]] * 3


async def test_a_queue_of_one_refuses_the_third_request(autojump_clock: trio.testing.MockClock) -> None:
    loop = new_loop(max_waiting=1, max_num_seqs=1)
    async with running(loop), trio.open_nursery() as nursery:
        await started(lambda: finish(loop, greedy([1], 5)), nursery)
        await started(lambda: finish(loop, greedy([1], 5)), nursery)
        with pytest.raises(Overloaded, match="2 requests are running or waiting"):
            await finish(loop, greedy([1], 5))


async def test_a_request_without_blocks_waits_in_the_queue_not_in_a_seat(
    autojump_clock: trio.testing.MockClock,
) -> None:
    loop = new_loop(ScriptedModel(num_blocks=8), max_waiting=1, max_num_seqs=4)
    async with running(loop), trio.open_nursery() as nursery:
        await started(lambda: finish(loop, greedy([1] * 16, 12)), nursery)
        await started(lambda: finish(loop, greedy([1] * 16, 12)), nursery)
        await trio.sleep(1.5)
        with pytest.raises(Overloaded):
            await finish(loop, greedy([1], 5))


async def test_all_of_a_submission_is_accepted_or_none(autojump_clock: trio.testing.MockClock) -> None:
    loop = new_loop(max_waiting=1, max_num_seqs=2)
    async with running(loop), trio.open_nursery() as nursery:
        await started(lambda: finish(loop, greedy([1], 5)), nursery)
        with pytest.raises(Overloaded):
            async with loop.submit([greedy([1], 2)] * 3):
                raise AssertionError("not reached")
        assert loop.num_in_flight == 1
        async with loop.submit([greedy([1], 2)] * 2) as generation:
            assert len(await tokens_of(generation)) == 4


async def test_a_held_place_is_nobody_else_s(autojump_clock: trio.testing.MockClock) -> None:
    """Two places: one is held while its request is prepared, so a second fits and a third does not."""
    loop = new_loop(max_waiting=1, max_num_seqs=1)
    async with running(loop), trio.open_nursery() as nursery:
        with loop.hold_place():
            await started(lambda: finish(loop, greedy([1], 5)), nursery)
            with pytest.raises(Overloaded, match="2 requests are running or waiting"), loop.hold_place():
                raise AssertionError("not reached")
            with pytest.raises(Overloaded):
                await finish(loop, greedy([1], 5))
        assert await finish(loop, greedy([5], 1)) == [6]  # left, it is had by who submits next


async def test_a_place_is_free_again_however_its_block_is_left(autojump_clock: trio.testing.MockClock) -> None:
    loop = new_loop(max_waiting=1, max_num_seqs=1)
    async with running(loop):
        with pytest.raises(ZeroDivisionError), loop.hold_place():
            raise ZeroDivisionError
        with trio.move_on_after(1), loop.hold_place():
            await trio.sleep_forever()
        with loop.hold_place(), loop.hold_place():
            pass
    with pytest.raises(ShuttingDown), loop.hold_place():
        raise AssertionError("not reached")


async def test_refusals_take_no_time_from_who_is_admitted(autojump_clock: trio.testing.MockClock) -> None:
    """Twenty times the capacity comes at every step; each token comes when it would have come anyway."""
    async with running(new_loop(max_waiting=1, max_num_seqs=1)) as loop:
        times: list[float] = []
        async with loop.submit([greedy([1], 9)]) as generation, loop.submit([greedy([1], 9)]):
            async for _, output in generation:
                times.append(trio.current_time())
                for _ in range(40 if output.finish is None else 0):
                    with pytest.raises(Overloaded):
                        await finish(loop, greedy([1], 9))
    assert [time - times[0] for time in times] == list(range(9))


@pytest.mark.parametrize(
    ("requests", "error"),
    [
        ([greedy([1], 2)] * 6, InvalidRequest),
        ([greedy([1], 2), greedy([1] * 100, 100)], ContextLengthExceeded),
        ([greedy([], 2)], InvalidRequest),
    ],
)
async def test_what_can_never_be_served_is_refused_on_entry(
    requests: list[GenRequest], error: type[Exception], autojump_clock: trio.testing.MockClock
) -> None:
    async with running(new_loop(max_waiting=1)) as loop:
        with pytest.raises(error):
            async with loop.submit(requests):
                raise AssertionError("not reached")
        assert loop.num_in_flight == 0


@pytest.mark.parametrize("seconds", [0.0, 0.5, 1.5, 4.5])
async def test_leaving_the_block_frees_everything_by_the_next_step(
    seconds: float, autojump_clock: trio.testing.MockClock
) -> None:
    """Before it is in the engine, in prefill and in decode."""
    async with running(new_loop()) as loop:
        async with loop.submit([greedy([1] * 12, 40)]):
            if seconds:
                await trio.sleep(seconds)
        assert loop.num_in_flight == 0
        await trio.sleep(1)
        assert loop.stats().num_blocks_used == 0
        assert loop.stats().num_running == 0


async def test_a_cancelled_reader_leaves_at_once(autojump_clock: trio.testing.MockClock) -> None:
    async with running(new_loop()) as loop:
        with trio.move_on_after(2.5):
            await finish(loop, greedy([1], 50))
        assert loop.num_in_flight == 0
        assert await finish(loop, greedy([1], 2)) == [2, 3]


async def test_leaving_after_the_last_output_aborts_nothing_twice(autojump_clock: trio.testing.MockClock) -> None:
    async with running(new_loop()) as loop:
        async with loop.submit([greedy([1], 2)]) as generation:
            await tokens_of(generation)
        await loop.wait_idle()
        stats = loop.stats()
        assert (stats.num_blocks_free, stats.num_blocks_used) == (64, 0)


async def test_who_waits_past_the_deadline_is_refused(autojump_clock: trio.testing.MockClock) -> None:
    loop = new_loop(max_num_seqs=1, queue_deadline=5)
    async with running(loop), trio.open_nursery() as nursery:
        await started(lambda: finish(loop, greedy([1], 20)), nursery)
        begin = trio.current_time()
        with pytest.raises(NoCapacity, match="no room within 5 s"):
            await finish(loop, greedy([2], 3))
        assert 5 <= trio.current_time() - begin <= 6
        nursery.cancel_scope.cancel()


async def test_a_request_that_has_started_has_no_deadline(autojump_clock: trio.testing.MockClock) -> None:
    async with running(new_loop(queue_deadline=2)) as loop:
        assert len(await finish(loop, greedy([1] * 12, 20))) == 20


async def test_a_failed_step_is_loud_and_bounded() -> None:
    """Every request in flight ends with InternalFault after what it had got; nothing new is taken."""
    loop = new_loop(FailingModel(), step_delay=0)
    faults = []

    async def one() -> None:
        async with loop.submit([greedy([1], 9)]) as generation:
            assert len([await anext(generation), await anext(generation)]) == 2
            with pytest.raises(InternalFault) as caught:
                await anext(generation)
            assert "a bug of ours" not in caught.value.message
            faults.append(caught.value)

    with pytest.RaisesGroup(ZeroDivisionError):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(one)
            nursery.start_soon(one)
            await trio.testing.wait_all_tasks_blocked()
            try:
                await loop.run()
            finally:
                with trio.CancelScope(shield=True, deadline=trio.current_time() + 5):
                    await trio.testing.wait_all_tasks_blocked()
    assert len(faults) == 2
    assert loop.is_dead
    assert loop.num_in_flight == 0
    with pytest.raises(InternalFault):
        await finish(loop, greedy([1], 2))


async def test_the_death_of_the_loop_can_be_waited_for() -> None:
    loop = new_loop(FailingModel(), step_delay=0)

    async def die() -> None:
        with pytest.raises(ZeroDivisionError):
            await loop.run()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(die)
        with pytest.raises(InternalFault):
            await finish(loop, greedy([1], 9))
        await loop.died.wait()


async def test_stop_ends_what_is_in_flight_and_takes_nothing_new(autojump_clock: trio.testing.MockClock) -> None:
    async with running(new_loop()) as loop:
        async with loop.submit([greedy([1], 30)]) as generation:
            assert isinstance((await anext(generation))[1], TokenOut)
            loop.stop()
            with pytest.raises(ShuttingDown):
                await tokens_of(generation)
        with pytest.raises(ShuttingDown):
            await finish(loop, greedy([1], 2))
    assert loop.stats().num_blocks_used == 0
    assert not loop.is_dead


async def test_cancelling_the_loop_ends_what_is_in_flight(autojump_clock: trio.testing.MockClock) -> None:
    loop = new_loop()
    async with trio.open_nursery() as nursery, loop.submit([greedy([1], 30)]) as generation:
        nursery.start_soon(loop.run)
        await anext(generation)
        nursery.cancel_scope.cancel()
        with trio.CancelScope(shield=True, deadline=trio.current_time() + 5), pytest.raises(ShuttingDown):
            await tokens_of(generation)
    assert loop.num_in_flight == 0


async def test_wait_idle_returns_when_the_last_request_has_ended(autojump_clock: trio.testing.MockClock) -> None:
    async with running(new_loop()) as loop, trio.open_nursery() as nursery:
        await loop.wait_idle()
        await started(lambda: finish(loop, greedy([1], 5)), nursery)
        begin = trio.current_time()
        await loop.wait_idle()
        assert trio.current_time() - begin == 5
        assert loop.stats().num_running == 0


async def test_the_loop_rests_when_there_is_nothing_to_do(autojump_clock: trio.testing.MockClock) -> None:
    model = ScriptedModel(script=COUNT_UP)
    async with running(new_loop(model)) as loop:
        await trio.sleep(1000)
        assert model.batches == []
        assert await finish(loop, greedy([1], 2)) == [2, 3]
        await trio.sleep(1000)
        assert len(model.batches) == 2
