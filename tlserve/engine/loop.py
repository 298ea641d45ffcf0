"""The task that owns the engine, and the way in and out of it for everybody else."""

# Rule 1: the engine belongs to ``run``, which lends it to a thread for a run of steps and has it back afterwards.
#         Others leave a note (a submission, an abort, a stop); a note ends the run of steps at the next boundary,
#         and takes effect there. So nothing is locked, and steps follow each other without a visit to the event loop.
# Rule 2: a submission is accepted or refused at once, counting the notes together with the queue behind them and with
#         the places that are held for submissions still being prepared.
# Rule 3: an accepted submission has a channel with room for everything it may produce, so the engine never waits
#         for a reader; and its channel is always closed: after the last output, or with an error.

from __future__ import annotations

import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass

import trio

from tlserve.engine.engine import Engine, Output
from tlserve.engine.request import EngineStats, GenRequest, RequestId
from tlserve.errors import ApiError, InternalFault, InvalidRequest, NoCapacity, Overloaded, ShuttingDown

# Seconds until a run of steps ends by itself, so that queue deadlines and a cancellation are seen in time.
LONGEST_RUN = 0.1

Post = Callable[..., object]  # post(function, *arguments) has it called soon, in order, by the event loop


@dataclass(eq=False, slots=True)
class _Entry:
    """One request of a submission."""

    generation: Generation
    index: int
    request: GenRequest
    deadline: float  # to leave the queue by
    id: RequestId | None = None  # once the engine has it
    has_ended: bool = False


class Generation:
    """The outputs of one submission as they come: an async iterator of ``(index, output)``.

    ``index`` is the place of the request in the submission. Ends after the last output of all. Raises NoCapacity
    when one of them waited in the queue past its deadline, InternalFault when a step has failed, ShuttingDown when
    the loop was stopped; each after the outputs that came before.
    """

    def __init__(self, requests: Sequence[GenRequest], deadline: float) -> None:
        self.entries = [_Entry(self, index, request, deadline) for index, request in enumerate(requests)]
        self.accepted_at = time.monotonic()
        self.queue_time: float | None = None  # seconds until one of the requests began to run; None before that
        self._num_open = len(requests)
        self._error: ApiError | None = None
        room = sum(max(1, request.max_tokens) for request in requests)
        self._send, self._receive = trio.open_memory_channel[tuple[int, Output]](room)

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> tuple[int, Output]:
        try:
            return await self._receive.receive()
        except trio.EndOfChannel:
            if self._error is not None:
                raise self._error from None
            raise StopAsyncIteration from None

    def take_ready(self, most: int) -> list[tuple[int, Output]]:
        """Up to ``most`` of the outputs that have come already."""
        ready: list[tuple[int, Output]] = []
        with suppress(trio.WouldBlock, trio.EndOfChannel):
            while len(ready) < most:
                ready.append(self._receive.receive_nowait())
        return ready

    def put(self, entry: _Entry, output: Output) -> None:
        """For the loop: hand over an output of one of ``entries``."""
        self._send.send_nowait((entry.index, output))
        if output.finish is not None:
            entry.has_ended = True
            self._num_open -= 1
            if self._num_open == 0:
                self._send.close()

    def close(self, error: ApiError | None = None) -> None:
        """For the loop: nothing more will come. The first call counts."""
        if self._error is None and self._num_open:
            self._error = error
        self._send.close()


class EngineLoop:
    """Owns an Engine while ``run`` runs. Any task may call the other methods; only ``wait_idle`` waits."""

    def __init__(
        self,
        engine: Engine,
        *,
        queue_deadline: float,
        step_delay: float = 0.0,
        in_thread: bool = True,
        on_step: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        """``queue_deadline`` is in seconds; ``step_delay`` seconds are slept after each step, for tests.

        ``on_step`` is told how long each step took, by the event loop after the step's outputs went out. With
        ``in_thread`` False a step blocks the event loop: for tests with a clock that jumps.
        """
        self.died = trio.Event()  # set when a step has failed
        self.max_model_len = engine.max_model_len
        self._engine = engine
        self._queue_deadline = queue_deadline
        self._step_delay = step_delay
        self._on_step = on_step
        self._in_thread = in_thread
        self._is_step_by_step = step_delay > 0 or not in_thread
        self._limiter = trio.CapacityLimiter(1)  # a thread of its own, whoever else waits for one
        self._num_held = 0  # places of submissions that are being prepared
        self._inbox: deque[_Entry] = deque()  # accepted, not in the engine yet
        self._entries: dict[RequestId, _Entry] = {}  # in the engine
        self._queued: deque[_Entry] = deque()  # in the engine, perhaps not started, the first deadline first
        self._aborted: list[RequestId] = []  # in the engine, their clients have left
        self._has_notes = False
        self._wake = trio.Event()
        self._became_idle = trio.Event()
        self._is_stopping = False
        self._at_boundary(engine.stats(), engine.num_free_places, ())

    @property
    def is_dead(self) -> bool:
        return self.died.is_set()

    @property
    def num_in_flight(self) -> int:
        """Requests that were accepted and have not ended."""
        return len(self._inbox) + len(self._entries)

    def stats(self) -> EngineStats:
        """The engine as it was at the last step boundary."""
        return self._stats

    @contextmanager
    def hold_place(self) -> Iterator[None]:
        """A place for a request that is still being prepared, so that nobody prepares what would be refused.

        A submission that follows the block with nothing awaited between has the place. Raises what ``submit``
        raises for a request that does not fit now, or for any.
        """
        self._check_room(1)
        self._num_held += 1
        try:
            yield
        finally:
            self._num_held -= 1

    @asynccontextmanager
    async def submit(self, requests: Sequence[GenRequest]) -> AsyncIterator[Generation]:
        """``async with loop.submit(requests) as generation``: all of them are accepted on entry, or none.

        Raises Overloaded when they do not all fit now, InvalidRequest or ContextLengthExceeded when they never
        will, ShuttingDown or InternalFault when the loop has ended.

        Resource handling: leaving the block aborts what has not ended, at once and without waiting; the blocks
        are free before the next step.
        """
        generation = self._accept(requests)
        try:
            yield generation
        finally:
            self._leave(generation)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Step while there is work, until ``stop``.

        Error handling: what a step raises ends every request in flight with InternalFault, sets ``died`` and is
        raised on. Cancellation handling: a step in its thread is waited for, then all that is in flight ends.
        """
        task_status.started()
        try:
            while not self._is_stopping:
                self._take_notes()
                if self._engine.has_work():
                    await self._compute()
                else:
                    await self._rest()
        except Exception:
            self.died.set()
            self._end_all(InternalFault("the engine has stopped after a fault"))
            raise
        finally:
            self._is_stopping = True
            self._end_all(ShuttingDown("the server is shutting down"))
            if not self.is_dead:
                self._engine.abort_all()
            self._at_boundary(self._engine.stats(), 0, ())

    async def wait_idle(self) -> None:
        """Return when no request is in flight and what was aborted has given its blocks back."""
        while self.num_in_flight or self._aborted:
            await self._became_idle.wait()

    def stop(self) -> None:
        """End ``run`` at the next step boundary, and what is in flight with ShuttingDown. Idempotent."""
        self._is_stopping = True
        self._leave_note()

    def _check_room(self, num_requests: int) -> None:
        """Raise unless so many more requests are taken now."""
        if self.is_dead:
            raise InternalFault("the engine has stopped after a fault")
        if self._is_stopping:
            raise ShuttingDown("the server is shutting down")
        most = self._engine.max_requests
        if num_requests > most:
            raise InvalidRequest(f"at most {most} prompts can be served at once, got {num_requests}")
        if len(self._inbox) + self._num_held + num_requests > self._num_free_places:
            num_taken = self.num_in_flight + self._num_held
            raise Overloaded(f"{num_taken} requests are running or waiting, no more are taken now")

    def _accept(self, requests: Sequence[GenRequest]) -> Generation:
        self._check_room(len(requests))
        for request in requests:
            self._engine.check(request)
        generation = Generation(requests, trio.current_time() + self._queue_deadline)
        self._inbox += generation.entries
        self._leave_note()
        return generation

    def _leave(self, generation: Generation) -> None:
        for entry in generation.entries:
            if entry.has_ended:
                continue
            entry.has_ended = True
            if entry.id is None:
                self._inbox.remove(entry)
            else:
                del self._entries[entry.id]
                self._aborted.append(entry.id)
        generation.close()
        self._leave_note()

    def _leave_note(self) -> None:
        self._has_notes = True
        self._wake.set()

    def _take_notes(self) -> None:
        self._has_notes = False
        for request_id in self._aborted:
            self._engine.abort(request_id)
        self._aborted.clear()
        while self._inbox:
            entry = self._inbox.popleft()
            entry.id = self._engine.add_request(entry.request)
            self._entries[entry.id] = entry
            self._queued.append(entry)
        self._drop_overdue()
        self._at_boundary(self._engine.stats(), self._engine.num_free_places, ())

    def _drop_overdue(self) -> None:
        """Refuse who has waited past the deadline without ever having run."""
        while self._queued:
            entry = self._queued[0]
            assert entry.id is not None
            if not entry.has_ended and not self._engine.has_started(entry.id):
                if entry.deadline > trio.current_time():
                    return
                self._fail(entry.generation, NoCapacity(f"no room within {self._queue_deadline:g} s"))
            self._queued.popleft()

    def _fail(self, generation: Generation, error: ApiError) -> None:
        for entry in generation.entries:
            if not entry.has_ended and entry.id is not None:
                entry.has_ended = True
                del self._entries[entry.id]
                self._engine.abort(entry.id)
        generation.close(error)

    async def _rest(self) -> None:
        self._signal_idle()
        self._wake = trio.Event()  # all notes so far are taken
        await self._wake.wait()

    async def _compute(self) -> None:
        """Have steps made until there is a note or nothing to do; their outputs have come when this returns."""
        if self._in_thread:
            post = trio.lowlevel.current_trio_token().run_sync_soon
            await trio.to_thread.run_sync(self._make_steps, post, limiter=self._limiter)
        else:
            self._make_steps(_call_now)
            await trio.sleep(self._step_delay)

    def _make_steps(self, post: Post) -> None:
        """The thread's part. What a step brought goes out while the next one computes."""
        end = time.monotonic() + LONGEST_RUN
        while self._engine.has_work():
            began = time.monotonic()
            outputs = self._engine.step()
            seconds = time.monotonic() - began
            if self._step_delay and self._in_thread:
                time.sleep(self._step_delay)
            self._note_starts(began)
            post(self._after_step, seconds, self._engine.stats(), self._engine.num_free_places, outputs)
            if self._has_notes or self._is_step_by_step or time.monotonic() > end:
                return

    def _note_starts(self, began: float) -> None:
        """In the thread, which has ``_queued`` for as long as it has the engine: whose turn came in that step?"""
        for entry in self._queued:
            generation = entry.generation
            assert entry.id is not None
            if generation.queue_time is None and not entry.has_ended and self._engine.has_started(entry.id):
                generation.queue_time = began - generation.accepted_at

    def _after_step(self, seconds: float, stats: EngineStats, num_free_places: int, outputs: Sequence[Output]) -> None:
        self._at_boundary(stats, num_free_places, outputs)
        self._on_step(seconds)

    def _at_boundary(self, stats: EngineStats, num_free_places: int, outputs: Sequence[Output]) -> None:
        self._stats = stats
        self._num_free_places = num_free_places
        for output in outputs:
            entry = self._entries.get(output.id)
            if entry is None:  # its client left during the step
                continue
            if output.finish is not None:
                del self._entries[output.id]
            entry.generation.put(entry, output)

    def _end_all(self, error: ApiError) -> None:
        for entry in [*self._inbox, *self._entries.values()]:
            entry.has_ended = True
            entry.generation.close(error)
        self._inbox.clear()
        self._entries.clear()
        self._queued.clear()
        self._aborted.clear()
        self._signal_idle()

    def _signal_idle(self) -> None:
        self._became_idle.set()
        self._became_idle = trio.Event()


def _call_now(function: Callable[..., object], *arguments: object) -> None:
    function(*arguments)
