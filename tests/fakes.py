"""A model that is quick, exact and shows every fault in block tables: for tests without weights."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tlserve.model.batch import Batch, ForwardOutput

EMPTY = b"\0" * 8


class ScriptedModel:
    """Logits are a hash of what the block tables lead to.

    In place of keys and values a token leaves in its block a hash of itself, its position and what the block table
    says stands before it; its logits are a hash of all of that from position 0 on. So a wrong table, a stale block
    or a block shared after another prefix changes what is drawn, as it would with real attention.

    ``habit`` is how strongly the last token alone decides the next one: 0 gives random text, 8 fixed cycles.
    ``script`` replaces the hash: the last token to the next one, which is then all but certain.
    """

    def __init__(
        self,
        *,
        vocab_size: int = 16,
        num_blocks: int = 64,
        block_size: int = 4,
        max_model_len: int = 128,
        hidden_size: int = 4,
        habit: float = 0.0,
        script: dict[int, int] | None = None,
        salt: int = 0,
    ) -> None:
        self.vocab_size = vocab_size
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.max_model_len = max_model_len
        self.hidden_size = hidden_size
        self.batches: list[Batch] = []  # copies of all that was computed, the first first
        self._computed: set[bytes] = set()
        self._habit = habit
        self.script = script
        self._salt = salt.to_bytes(8, "little")
        self._kv: NDArray[np.void] = np.zeros((num_blocks, block_size), "V8")

    def forward(self, batch: Batch) -> ForwardOutput:
        self.batches.append(_copy(batch))
        contexts: list[bytes] = []
        for token, position, row in zip(batch.token_ids, batch.positions, batch.request_rows, strict=True):
            table = batch.block_tables[row, : position // self.block_size + 1]
            before = self._kv[table].reshape(-1)[:position].tobytes()
            value = self._value(before[-8:] if before else EMPTY, int(token), int(position))
            self._kv[table[-1], position % self.block_size] = np.void(value)
            self._computed.add(value)
            contexts.append(before + value)
        logits = [self._logits(contexts[row], int(batch.token_ids[row])) for row in batch.logits_rows]
        hidden = [self._hidden(contexts[row]) for row in batch.hidden_rows]
        return ForwardOutput(
            logits=np.array(logits, np.float32).reshape(len(logits), self.vocab_size),
            hidden=np.array(hidden, np.float32).reshape(len(hidden), self.hidden_size),
        )

    def logits_after(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """[vocab_size] what a model without blocks would say; the oracle of ``forward``."""
        return self._logits(self._context(tokens), tokens[-1])

    def hidden_of(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """[len(tokens), hidden_size] the hidden state after each token, without blocks."""
        return np.array([self._hidden(self._context(tokens[: n + 1])) for n in range(len(tokens))], np.float32)

    def has_computed(self, tokens: Sequence[int]) -> bool:
        """Whether the last of these tokens was ever computed after exactly the others."""
        return self._context(tokens)[-8:] in self._computed

    def _context(self, tokens: Sequence[int]) -> bytes:
        values = [EMPTY]
        for position, token in enumerate(tokens):
            values.append(self._value(values[-1], token, position))
        return b"".join(values[1:])

    def _value(self, before: bytes, token: int, position: int) -> bytes:
        pair = token.to_bytes(4, "little") + position.to_bytes(4, "little")
        return hashlib.blake2b(before + pair, digest_size=8, salt=self._salt).digest()

    def _logits(self, context: bytes, last: int) -> NDArray[np.float32]:
        logits = self._numbers(context, self.vocab_size)
        if self.script is not None:
            logits[self.script.get(last, last)] += 100.0
        logits[(last * 5 + 3) % self.vocab_size] += np.float32(self._habit)
        return logits

    def _hidden(self, context: bytes) -> NDArray[np.float32]:
        return self._numbers(context + b"hidden", self.hidden_size)

    def _numbers(self, context: bytes, count: int) -> NDArray[np.float32]:
        """[count] numbers from 0 to 8; coarse, so that some are equal."""
        digest = hashlib.shake_128(self._salt + context).digest(2 * count)
        return (np.frombuffer(digest, np.uint16) >> 6).astype(np.float32) / np.float32(128)


def _copy(batch: Batch) -> Batch:
    return Batch(
        token_ids=batch.token_ids.copy(),
        positions=batch.positions.copy(),
        request_rows=batch.request_rows.copy(),
        block_tables=batch.block_tables.copy(),
        logits_rows=batch.logits_rows.copy(),
        hidden_rows=batch.hidden_rows.copy(),
    )
