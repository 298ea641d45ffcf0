"""From a configuration to a model that can answer: files, weights, compiled kernels, tokenizer, template."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from tlserve.config import EngineConfig, ServeConfig
from tlserve.engine.engine import Engine, check_draft_model
from tlserve.engine.loop import EngineLoop
from tlserve.kernels.jit import cache_key, cache_root
from tlserve.log import LOGGER
from tlserve.model.checkpoint import Checkpoint, open_checkpoint
from tlserve.model.plan import MemoryPlan, plan_memory
from tlserve.model.runner import Runner, load_runner
from tlserve.openai.service import Service
from tlserve.overview import Overview, overview_of
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
    overview: Overview

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


@dataclass(frozen=True)
class Opened:
    """A model whose files have been read and whose memory is planned; nothing is compiled or packed yet.

    The draft model, where there is one, comes second.
    """

    config: ServeConfig
    models: tuple[tuple[Checkpoint, EngineConfig], ...]
    plans: tuple[MemoryPlan, ...]
    chat_encoder: ChatEncoder

    @property
    def overview(self) -> Overview:
        draft = self.plans[1] if len(self.plans) > 1 else None
        return overview_of(self.config, self.models[0][0], self.plans[0], draft, self.chat_encoder)


def open_model(config: ServeConfig) -> Opened:
    """Read the files of the model, and decide how the memory is used. Raises ConfigError or ModelError."""
    checkpoint = open_checkpoint(config.model_dir)
    chat_encoder = load_text(checkpoint.text, checkpoint.path)
    models = [(checkpoint, config.engine)]
    speculative = config.engine.speculative
    if speculative is not None and speculative.draft_model_dir is not None:
        # Its own context may be the shorter one; past it there are no drafts.
        draft_config = replace(config.engine, max_model_len=None, speculative=None)
        models.append((open_checkpoint(speculative.draft_model_dir), draft_config))
    plans = plan_memory(*models)
    for draft in plans[1:]:
        check_draft_model(plans[0], draft)
    return Opened(config, tuple(models), plans, chat_encoder)


def load(config: ServeConfig, progress: Progress) -> Loaded:
    """Load the model of ``config`` and compute once with it, so that the first request is served at full speed.

    Raises ConfigError or ModelError; runs for a second or so once kernels are compiled.
    """
    opened = open_model(config)
    _announce_compiling()
    runners = [
        load_runner(checkpoint, engine_config, progress, plan=plan)
        for (checkpoint, engine_config), plan in zip(opened.models, opened.plans, strict=True)
    ]
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
        chat_encoder=opened.chat_encoder,
        stop_ids=opened.chat_encoder.tokenizer.eos_ids | opened.models[0][0].config.eos_token_ids,
        fingerprint=runners[0].fingerprint,
        overview=opened.overview,
    )


def _announce_compiling() -> None:
    """The first start takes long, and a program that shows its log should know why."""
    if next((cache_root() / cache_key()).glob("*"), None) is None:
        LOGGER.info("compiling kernels, once per machine, which takes half a minute", extra={"cache": cache_root()})
