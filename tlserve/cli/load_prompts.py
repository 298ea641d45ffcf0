"""Prompts of about a wanted number of tokens, each unlike the others, the same again for the same seed."""

from __future__ import annotations

import random
from dataclasses import dataclass

# Common enough that most vocabularies have each, with the space before it, as one token.
WORDS = """
    time people year way day man thing world life hand part child eye woman place work week case point
    company number group problem fact water room mother area money story month book home night word house
    side business issue kind head service friend father power hour game line end member law car city name
    team minute idea body back face level office door health person art war history party result change
    morning reason research girl moment air teacher force education
""".split()  # noqa: SIM905 a list literal would be a page of quotes

# Words of the two prompts whose token counts show what a word costs. Short, so that they fit any context.
PROBE_WORDS = (8, 24)


@dataclass(frozen=True, slots=True)
class WordCost:
    """How a server counts: tokens for each word, and those that it puts around every prompt."""

    tokens_per_word: float
    overhead: float

    @classmethod
    def from_probes(cls, few_tokens: int, many_tokens: int) -> WordCost:
        """From the token counts of prompts of PROBE_WORDS words."""
        few, many = PROBE_WORDS
        per_word = max(0.1, (many_tokens - few_tokens) / (many - few))
        return cls(per_word, max(0.0, few_tokens - per_word * few))

    def words_for(self, num_tokens: int) -> int:
        """Words of a whole prompt of so many tokens, one at least."""
        return max(1, round((num_tokens - self.overhead) / self.tokens_per_word))


@dataclass(frozen=True, slots=True)
class Prompts:
    """``text(i)`` is the prompt of request i; the first ``num_shared_words`` are the same in all."""

    seed: int
    num_words: int
    num_shared_words: int = 0

    def text(self, index: int) -> str:
        shared = _words(f"{self.seed}", min(self.num_shared_words, self.num_words))
        own = _words(f"{self.seed}/{index}", self.num_words - len(shared))
        return " ".join(shared + own)


def _words(seed: str, count: int) -> list[str]:
    # A seed that is a string is hashed by its text, so the words do not depend on the process.
    return random.Random(seed).choices(WORDS, k=count)
