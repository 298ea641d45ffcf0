"""Who computes how many tokens in the next step."""

# Rule 1: there is no prefill and no decode. A request has tokens that are known and not computed, and a step
#         spends a budget of tokens on letting requests catch up.
# Rule 2: who is one token short of its next draw comes first, so a long prompt never makes a stream wait;
#         then running prompts, then waiting requests, by priority and arrival; drafts take what is left over.
# Rule 3: only a request one token short grows its table (admission took blocks for all known tokens), and only
#         that can run out of blocks. Then the least urgent running request gives its blocks back and waits
#         again. So the most urgent one never loses its blocks, and in a pool that holds it, it finishes.

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass
from operator import attrgetter

from tlserve.engine.drafters import Drafter
from tlserve.engine.kv_cache import KvCache
from tlserve.engine.state import RequestState, RequestStatus

_urgency = attrgetter("urgency")

# While streams run, the prompts of a step get this many tokens for each of them, so that a step stays under 2.5
# times one without a prompt. Reading the weights costs as much as some tokens do: fewer streams count as this many.
# With one stream, its token and its share of a prompt then are eight, which kernels multiply at once; with more streams
# the share grows to up to MOST_SHARE where that makes the step whole eights.
PROMPT_SHARE = 1.5
MOST_SHARE = 1.75
LEAST_STREAMS = 5
COLUMNS = 8
# A burst comes over some steps. While no stream has drawn so many tokens, prompts have the whole budget, as those have
# that come together: the first ones do not hold back all others.
YOUNG = 4


@dataclass(slots=True)
class Schedule:
    """The requests of one step. Each computes ``num_scheduled_tokens`` known tokens and its draft."""

    requests: list[RequestState]
    token_budget: int  # what is left of it
    prompt_budget: int  # what prompts may still take of that


class Scheduler:
    """The waiting and the running requests. ``schedule`` decides and keeps the books; it computes nothing."""

    def __init__(
        self, kv_cache: KvCache, drafter: Drafter, *, max_batch_tokens: int, max_num_seqs: int, prefill_chunk: int
    ) -> None:
        self.waiting: list[RequestState] = []  # most urgent first, as is
        self.running: list[RequestState] = []
        self.num_preemptions = 0
        self.is_short_of_blocks = False  # the last step left a request waiting for blocks alone
        self._kv_cache = kv_cache
        self._drafter = drafter
        self._max_batch_tokens = max_batch_tokens
        # Every running request gets at least one token in each step.
        self.max_running = min(max_num_seqs, max_batch_tokens)
        self._prefill_chunk = prefill_chunk or max_batch_tokens

    def add(self, state: RequestState) -> None:
        insort(self.waiting, state, key=_urgency)

    def finish(self, state: RequestState) -> None:
        """Take a request out for good; its blocks are free at once. Does nothing the second time."""
        if state.status is RequestStatus.RUNNING:
            _remove(self.running, state)
            self._kv_cache.release(state)
        elif state.status is RequestStatus.WAITING:
            _remove(self.waiting, state)
        state.status = RequestStatus.FINISHED

    def schedule(self) -> Schedule:
        schedule = Schedule([], self._max_batch_tokens, self._max_batch_tokens)
        self._schedule_last_tokens(schedule)
        if any(state.num_output_tokens >= YOUNG for state in schedule.requests):
            schedule.prompt_budget = _prompt_budget(len(schedule.requests))
        schedule.prompt_budget = min(schedule.prompt_budget, schedule.token_budget)
        self._schedule_prompts(schedule)
        self._admit(schedule)
        self._schedule_drafts(schedule)
        return schedule

    def _schedule_last_tokens(self, schedule: Schedule) -> None:
        for state in [state for state in self.running if state.num_pending_tokens == 1]:
            # The victim is never more urgent than the one in turn: nobody scheduled so far is preempted.
            while state.status is RequestStatus.RUNNING and not self._kv_cache.reserve(state, state.num_tokens):
                self._preempt(self.running[-1])
            if state.status is RequestStatus.RUNNING:
                _schedule_tokens(schedule, state, 1)

    def _schedule_prompts(self, schedule: Schedule) -> None:
        for state in self.running:
            if state.num_pending_tokens > 1 and schedule.prompt_budget:
                self._schedule_chunk(schedule, state)

    def _admit(self, schedule: Schedule) -> None:
        self.is_short_of_blocks = False
        for state in list(self.waiting):
            if len(self.running) == self.max_running or not schedule.prompt_budget:
                return
            if self._can_wait_for_a_hit(state):
                continue
            # Each of those that run may need a block before the newcomer has drawn a token. This also keeps out
            # who was preempted a moment ago: one of the blocks it gave back is taken.
            if not self._kv_cache.admit(state, headroom=len(self.running)):
                self.is_short_of_blocks = True
                return
            _remove(self.waiting, state)
            state.status = RequestStatus.RUNNING
            insort(self.running, state, key=_urgency)
            self._schedule_chunk(schedule, state)

    def _can_wait_for_a_hit(self, state: RequestState) -> bool:
        """Whether a more urgent request is just reading what this one would read next."""
        readers = [other for other in self.running if other.num_pending_tokens > 1 and other.urgency < state.urgency]
        return self._kv_cache.is_coming(state, readers)

    def _schedule_chunk(self, schedule: Schedule, state: RequestState) -> None:
        count = min(state.num_pending_tokens, self._prefill_chunk, schedule.prompt_budget)
        _schedule_tokens(schedule, state, count)
        schedule.prompt_budget -= count

    def _schedule_drafts(self, schedule: Schedule) -> None:
        for state in schedule.requests:
            if not state.wants_logits:
                continue
            # One less than all that is left: the target's own draw follows the last guess.
            longest = min(len(state.tokens) - state.num_tokens - 1, schedule.token_budget)
            count = self._drafter.plan(state, longest) if longest > 0 else 0
            if count and self._kv_cache.reserve(state, state.num_tokens + count):
                state.num_draft_tokens = count
                schedule.token_budget -= count

    def _preempt(self, state: RequestState) -> None:
        self._kv_cache.release(state)
        _remove(self.running, state)
        state.status = RequestStatus.WAITING
        self.num_preemptions += 1
        self.add(state)

    def check_invariants(self) -> None:
        for queue, status in ((self.waiting, RequestStatus.WAITING), (self.running, RequestStatus.RUNNING)):
            assert queue == sorted(queue, key=_urgency)
            assert all(state.status is status for state in queue)
        assert len(self.running) <= self.max_running
        for state in self.waiting:
            assert not state.block_ids
            assert state.slot == -1
            assert state.num_computed_tokens == 0
        for state in self.running:
            assert state.num_pending_tokens > 0, f"{state} has nothing to compute"
            assert state.num_draft_tokens == 0, f"{state} still has a draft"
            assert state.num_tokens < len(state.tokens) or state.is_pooling
        self._kv_cache.check_invariants(self.running)

    def __repr__(self) -> str:
        return f"<Scheduler running={len(self.running)} waiting={len(self.waiting)}>"


def _prompt_budget(num_streams: int) -> int:
    """Tokens that prompts get in a step in which so many streams run."""
    whole = int((1 + MOST_SHARE) * num_streams) // COLUMNS * COLUMNS - num_streams
    return max(int(PROMPT_SHARE * max(LEAST_STREAMS, num_streams)), whole)


def _schedule_tokens(schedule: Schedule, state: RequestState, count: int) -> None:
    state.num_scheduled_tokens = count
    state.num_draft_tokens = 0
    schedule.requests.append(state)
    schedule.token_budget -= count


def _remove(queue: list[RequestState], state: RequestState) -> None:
    place = bisect_left(queue, state.urgency, key=_urgency)
    assert queue[place] is state
    del queue[place]
