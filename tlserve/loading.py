"""From a configuration to a model that can answer: files, weights, compiled kernels, tokenizer, template."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from tlserve.config import ServeConfig
from tlserve.engine.engine import Engine
from tlserve.engine.loop import EngineLoop
from tlserve.model.checkpoint import open_checkpoint
from tlserve.model.runner import Runner, load_runner
from tlserve.openai.service import Service
from tlserve.text.chat import ChatEncoder
from tlserve.text.loading import load_text

Progress = Callable[[str, int, int], None]  # what is being done, how much of it is done, of how much; may raise


def silent(what: str, done: int, total: int) -> None:
    """Progress that nobody looks at."""


@dataclass(frozen=True)
class Loaded:
    """A model in memory with everything that serving it takes."""

    config: ServeConfig
    engine: Engine
    runners: tuple[Runner, ...]  # the model, and the draft model where there is one
    chat_encoder: ChatEncoder
    stop_ids: frozenset[int]
    fingerprint: str

    def service(self, loop: EngineLoop) -> Service:
        """The model as the API's routes see it."""
        runner, tokenizer = self.runners[0], self.chat_encoder.tokenizer
        return Service(
            model_id=self.config.model_id,
            created=int(time.time()),
            system_fingerprint=self.fingerprint,
            tokenizer=tokenizer,
            chat_encoder=self.chat_encoder,
            loop=loop,
            vocab_size=runner.vocab_size,
            hidden_size=runner.hidden_size,
            max_model_len=loop.max_model_len,
            stop_ids=self.stop_ids,
            queue_capacity=self.config.queue_capacity,
            default_seed=self.config.engine.seed,
        )

    def close(self) -> None:
        """Give memory and threads back. The engine must not be stepping."""
        for runner in self.runners:
            runner.close()


def load(config: ServeConfig, progress: Progress) -> Loaded:
    """Load the model of ``config`` and compute once with it, so that the first request is served at full speed.

    Raises ConfigError or ModelError; runs for a second or so once kernels are compiled.
    """
    checkpoint = open_checkpoint(config.model_dir)
    chat_encoder = load_text(checkpoint.text, checkpoint.path)
    runners = [load_runner(checkpoint, config.engine, progress)]
    speculative = config.engine.speculative
    if speculative is not None and speculative.draft_model_dir is not None:
        # Its own context may be the shorter one; past it there are no drafts.
        draft = replace(
            config.engine, num_blocks=runners[0].num_blocks, kv_cache_mb=None, max_model_len=None, speculative=None
        )
        runners.append(load_runner(open_checkpoint(speculative.draft_model_dir), draft, progress))
    engine = Engine(
        runners[0],
        config.engine,
        max_waiting=config.queue_capacity,
        draft_model=runners[1] if len(runners) > 1 else None,
    )
    progress("warming up", 0, 1)
    engine.warm_up()
    progress("warming up", 1, 1)
    return Loaded(
        config=config,
        engine=engine,
        runners=tuple(runners),
        chat_encoder=chat_encoder,
        stop_ids=chat_encoder.tokenizer.eos_ids | checkpoint.config.eos_token_ids,
        fingerprint=runners[0].fingerprint,
    )
