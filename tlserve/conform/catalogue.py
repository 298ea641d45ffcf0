"""All cases, in the order in which they are listed: area by area."""

from __future__ import annotations

from tlserve.conform.case import Case
from tlserve.conform.cases import (
    bodies,
    chat,
    completions,
    embeddings,
    errors,
    exactness,
    health,
    life,
    logprobs,
    models,
    refusals,
    routes,
    sampling,
    stops,
    streams,
    tokens,
)

_MODULES = (
    models,
    routes,
    chat,
    streams,
    stops,
    sampling,
    logprobs,
    completions,
    embeddings,
    tokens,
    bodies,
    refusals,
    errors,
    exactness,
    health,
    life,
)
ALL_CASES: tuple[Case, ...] = tuple(case for module in _MODULES for case in module.CASES.all)
