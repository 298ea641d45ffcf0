"""The two shapes in which the API tells of log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence

from tlserve.engine.request import FinishReason
from tlserve.openai import schema
from tlserve.openai.choice import TokenAt
from tlserve.text.tokenizer import Tokenizer

# JSON has no minus infinity; the reference writes this for a token that cannot come.
MIN_LOGPROB = -9999.0


def chat_logprobs(tokens: Sequence[TokenAt], tokenizer: Tokenizer) -> schema.ChatLogprobs:
    """One entry a token, with its ``top_logprobs`` most likely first."""
    return schema.ChatLogprobs([_chat_entry(token, tokenizer) for token in tokens])


def completion_logprobs(tokens: Sequence[TokenAt], tokenizer: Tokenizer) -> schema.CompletionLogprobs:
    """Parallel lists. Each mapping has the most likely tokens and the drawn one.

    Two tokens may be spelt alike (parts of characters); the mapping then has the more likely of them.
    """
    return schema.CompletionLogprobs(
        tokens=[tokenizer.token_text(token.out.token) for token in tokens],
        token_logprobs=[_finite(token.out.logprob) for token in tokens],
        top_logprobs=[_top_mapping(token, tokenizer) for token in tokens],
        text_offset=[token.text_offset for token in tokens],
    )


def _chat_entry(token: TokenAt, tokenizer: Tokenizer) -> schema.TokenLogprob:
    out = token.out
    # The token that ended the request added nothing to the text, whatever it spells elsewhere.
    added = b"" if out.finish is FinishReason.STOP else tokenizer.token_bytes(out.token)
    return schema.TokenLogprob(
        token=tokenizer.token_text(out.token),
        logprob=_finite(out.logprob),
        bytes=list(added),
        top_logprobs=[
            schema.TopLogprob(tokenizer.token_text(id), _finite(logprob), list(tokenizer.token_bytes(id)))
            for id, logprob in out.top_logprobs
        ],
    )


def _top_mapping(token: TokenAt, tokenizer: Tokenizer) -> dict[str, float]:
    mapping: dict[str, float] = {}
    for id, logprob in (*token.out.top_logprobs, (token.out.token, token.out.logprob)):
        mapping.setdefault(tokenizer.token_text(id), _finite(logprob))
    return mapping


def _finite(logprob: float | None) -> float:
    assert logprob is not None, "logprobs were asked for"
    return max(logprob, MIN_LOGPROB)
