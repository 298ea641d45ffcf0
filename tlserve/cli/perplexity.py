"""``trio-tlserve perplexity``: how well a model predicts a text, in llama-perplexity's terms."""

# The text is cut into chunks of ctx_size tokens. Each begins with BOS, in place of its first token, where the
# tokenizer adds one; its second half is scored, so that every scored token has at least half a context before it.

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tlserve.cli.arguments import add_engine_options, engine_config, new_parser, positive
from tlserve.cli.progress import Progress
from tlserve.engine.step_batch import Model
from tlserve.errors import ConfigError
from tlserve.loading import load, open_model
from tlserve.model.batch import Batch

# Scored tokens of one step: a row of logits takes 4 bytes for each token of the vocabulary.
MAX_SCORED = 64
BLOCK_SIZE = 16

DESCRIPTION = """Print the perplexity of a model on a text: chunks of --ctx-size tokens, the second half of each
scored, as llama-perplexity does."""
EXAMPLES = (
    "trio-tlserve perplexity --model-dir model.gguf text.txt",
    "trio-tlserve perplexity --model-dir model.gguf --ctx-size 2048 --chunks 20 --weights f32 text.txt",
)


def main(argv: Sequence[str]) -> int:
    arguments = parser().parse_args(argv)
    text = _read(arguments.text)
    config = engine_config(
        arguments,
        max_model_len=arguments.ctx_size,
        max_batch_tokens=max(MAX_SCORED, arguments.ctx_size // 2),
        max_num_seqs=MAX_SCORED,  # the rows of logits that there is room for
        block_size=BLOCK_SIZE,
        num_blocks=-(-arguments.ctx_size // BLOCK_SIZE),
    )
    tokenizer = open_model(config).chat_encoder.tokenizer  # a text too short is refused before weights are read
    ids = tokenizer.encode(text, add_special_tokens=True, parse_special=False)
    bos_id = tokenizer.bos_id if tokenizer.adds_bos else None
    chunks = cut(ids, arguments.ctx_size, bos_id)[: arguments.chunks]
    with Progress() as progress, closing(load(config, progress)) as loaded:
        estimate = _score(loaded.runners[0], chunks, progress)
    figures = {"ppl": estimate.ppl, "error": estimate.error, "num_tokens": estimate.count, "chunks": len(chunks)}
    final = f"Final estimate: PPL = {estimate.ppl:.4f} +/- {estimate.error:.5f}"
    print(json.dumps(figures, indent=2) if arguments.json else final)
    return 0


def parser() -> argparse.ArgumentParser:
    made = new_parser("perplexity", DESCRIPTION, examples=EXAMPLES)
    add_engine_options(made)
    made.add_argument("text", type=Path, help="a UTF-8 text file")
    made.add_argument("-c", "--ctx-size", type=_even, default=512, metavar="N", help="tokens of a chunk; default 512")
    made.add_argument("--chunks", type=positive, metavar="N", help="score the first N chunks; default: all")
    return made


def _even(text: str) -> int:
    value = positive(text)
    if value % 2 or value < 4:
        raise argparse.ArgumentTypeError(f"must be an even integer of 4 or more, got {text!r}")
    return value


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").removesuffix("\n")  # as llama-perplexity does
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None


@dataclass(slots=True)
class Estimate:
    """Sums over the negative log-likelihoods of the scored tokens."""

    count: int = 0
    nll: float = 0.0
    nll_squared: float = 0.0

    def add(self, nll: NDArray[np.float64]) -> None:
        self.count += nll.size
        self.nll += float(nll.sum())
        self.nll_squared += float(np.square(nll).sum())

    @property
    def ppl(self) -> float:
        return math.exp(self.nll / self.count)

    @property
    def error(self) -> float:
        """The standard error of ``ppl``, were the tokens independent."""
        mean = self.nll / self.count
        variance = self.nll_squared / self.count - mean * mean
        return self.ppl * math.sqrt(max(0.0, variance) / max(1, self.count - 1))


def cut(ids: Sequence[int], ctx_size: int, bos_id: int | None) -> list[NDArray[np.int32]]:
    """Whole chunks only. Raises ConfigError for a text of less than two, which would say little."""
    if len(ids) < 2 * ctx_size:
        raise ConfigError(f"the text has {len(ids)} tokens, and a context of {ctx_size} needs {2 * ctx_size} or more")
    chunks = np.array(ids[: len(ids) // ctx_size * ctx_size], np.int32).reshape(-1, ctx_size)
    if bos_id is not None:
        chunks[:, 0] = bos_id
    return list(chunks)


def _score(model: Model, chunks: Sequence[NDArray[np.int32]], progress: Progress) -> Estimate:
    estimate = Estimate()
    progress("chunks", 0, len(chunks))
    for chunk in chunks:
        for nll in score_chunk(model, chunk):
            estimate.add(nll)
        progress.advance(f"PPL {estimate.ppl:.4f}")
    return estimate


def score_chunk(model: Model, chunk: NDArray[np.int32]) -> Iterator[NDArray[np.float64]]:
    """Negative log-likelihoods of the tokens after the middle one, each given all before it, MAX_SCORED at a time."""
    middle = len(chunk) // 2
    _forward(model, chunk, 0, middle, with_logits=False)
    for start in range(middle, len(chunk) - 1, MAX_SCORED):
        stop = min(start + MAX_SCORED, len(chunk) - 1)
        logits = _forward(model, chunk, start, stop, with_logits=True)
        yield negative_log_likelihoods(logits, chunk[start + 1 : stop + 1])


def _forward(
    model: Model, chunk: NDArray[np.int32], start: int, stop: int, *, with_logits: bool
) -> NDArray[np.float32]:
    """[stop - start, vocab] logits after tokens [start, stop), whose predecessors are in the blocks already."""
    count = stop - start
    batch = Batch(
        token_ids=chunk[start:stop],
        positions=np.arange(start, stop, dtype=np.int32),
        request_rows=np.zeros(count, np.int32),
        block_tables=np.arange(-(-len(chunk) // model.block_size), dtype=np.int32)[np.newaxis],
        logits_rows=np.arange(count if with_logits else 0, dtype=np.int32),
        hidden_rows=np.zeros(0, np.int32),
    )
    return model.forward(batch).logits


def negative_log_likelihoods(logits: NDArray[np.float32], targets: NDArray[np.int32]) -> NDArray[np.float64]:
    """[rows]; logits [rows, vocab]. Sums in double, for the vocabulary is long."""
    shifted = logits - logits.max(axis=1, keepdims=True)
    totals = np.exp(shifted).sum(axis=1, dtype=np.float64)
    chosen = shifted[np.arange(len(targets)), targets].astype(np.float64)
    difference: NDArray[np.float64] = np.log(totals) - chosen
    return difference
