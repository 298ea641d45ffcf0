"""Drives an engine over the scripted model and holds its outputs against the reference."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from tests.engine import reference_sampler
from tests.engine.reference_sampler import Drawn
from tests.fakes import ScriptedModel
from tlserve.config import EngineConfig, SpeculativeConfig
from tlserve.engine.engine import Engine
from tlserve.engine.request import GenRequest, PooledOut, RequestId, SamplingParams, TokenOut

GREEDY = SamplingParams(temperature=0.0)
PrefixCache = Literal["off", "hash", "radix"]


def prompt_lookup(num_tokens: int = 4) -> SpeculativeConfig:
    return SpeculativeConfig(method="prompt_lookup", num_tokens=num_tokens, ngram_min=1, ngram_max=3)


def draft_model(num_tokens: int = 4) -> SpeculativeConfig:
    return SpeculativeConfig(method="draft_model", num_tokens=num_tokens, draft_model_dir=Path("unused"))


def greedy(
    prompt: list[int], max_tokens: int = 4, *, priority: int = 0, stop_ids: frozenset[int] = frozenset()
) -> GenRequest:
    return GenRequest(tuple(prompt), max_tokens, GREEDY, priority=priority, stop_ids=stop_ids)


class Driver:
    """One engine, and what each request has brought so far. Invariants are checked after every step."""

    def __init__(
        self,
        model: ScriptedModel,
        *,
        prefix_cache: PrefixCache = "off",
        prefill_chunk: int = 0,
        max_num_seqs: int = 8,
        max_batch_tokens: int = 64,
        max_waiting: int = 64,
        speculative: SpeculativeConfig | None = None,
        draft: ScriptedModel | None = None,
    ) -> None:
        config = EngineConfig(
            prefix_cache=prefix_cache,
            prefill_chunk=prefill_chunk,
            max_num_seqs=max_num_seqs,
            max_batch_tokens=max_batch_tokens,
            speculative=speculative,
        )
        self.model = model
        self.engine = Engine(model, config, max_waiting=max_waiting, draft_model=draft, sample=reference_sampler.sample)
        self.requests: dict[RequestId, GenRequest] = {}
        self.drawn: dict[RequestId, list[Drawn]] = {}
        self.cached: dict[RequestId, int] = {}
        self.pooled: dict[RequestId, PooledOut] = {}
        self.num_steps = 0

    def add(self, request: GenRequest) -> RequestId:
        request_id = self.engine.add_request(request)
        self.requests[request_id] = request
        self.drawn[request_id] = []
        return request_id

    def step(self) -> list[TokenOut | PooledOut]:
        outputs = self.engine.step()
        self.num_steps += 1
        self.engine.check_invariants()
        for output in outputs:
            if isinstance(output, PooledOut):
                self.pooled[output.id] = output
            else:
                drawn = Drawn(output.token, output.finish, output.logprob, output.top_logprobs)
                self.drawn[output.id].append(drawn)
                self.cached[output.id] = output.num_cached_tokens
        return outputs

    def run(self, *, most_steps: int = 2000) -> None:
        """Step until nothing is left to do."""
        for _ in range(most_steps):
            if not self.engine.has_work():
                return
            self.step()
        raise AssertionError(f"still at work after {most_steps} steps")

    def finish(self, request: GenRequest) -> list[int]:
        """Add a request, run to the end, and return its tokens."""
        request_id = self.add(request)
        self.run()
        return self.tokens(request_id)

    def tokens(self, request_id: RequestId) -> list[int]:
        return [drawn.token for drawn in self.drawn[request_id]]

    def check_outputs(self) -> None:
        """Each request that has ended gave to the bit what the reference gives; others gave the beginning of it."""
        for request_id, request in self.requests.items():
            if not request.is_pooling:
                drawn = self.drawn[request_id]
                assert drawn == reference_sampler.generate(self.model, request)[: len(drawn)], request
