"""The cases against servers that lie: each lie is told by the cases that name its rule, and by no others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.conform.lies import LIES
from tests.conform.proxy import Lie, Recordings, lying
from tlserve import ServeConfig, spawn
from tlserve.conform.case import Case
from tlserve.conform.catalogue import ALL_CASES
from tlserve.conform.run import Result, run_cases
from tlserve.conform.subject import Target
from tlserve.http.client import Origin

TINY = Path(__file__).parents[2] / "fixtures" / "tiny-llama"
KEY = "sk-conform"
PATIENCE = 30.0  # seconds a case may take
SLOW = {"err.408", "err.429", "chat.max_tokens.absent"}  # tried only where they are what must fail


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    """A server that keeps every rule."""
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(f"{KEY}\n")
    with spawn(ServeConfig.for_model(TINY, api_keys_file=keys, header_timeout_ms=2000)) as server:
        host, port = server.health_addr
        health = Origin.parse(f"http://{host}:{port}")
        yield Target(api=Origin.parse(server.base_url), model="tiny-llama", health=health, api_key=KEY)


@pytest.fixture(scope="module")
def recordings() -> Recordings:
    return {}


async def run(target: Target, cases: Sequence[Case] = ALL_CASES) -> list[Result]:
    return await run_cases(cases, target, patience=PATIENCE, on_result=lambda result: None)


async def test_a_server_that_keeps_every_rule_passes_every_case(target: Target) -> None:
    assert [f"{result.case.id}: {result.detail}" for result in await run(target) if result.status != "passed"] == []


async def test_a_proxy_that_does_not_lie_passes_every_case(target: Target, recordings: Recordings) -> None:
    """What the other tests rest on: it is the lie that fails, not the proxy."""
    async with lying(target, Lie(), recordings) as proxy:
        assert [f"{result.case.id}: {result.detail}" for result in await run(proxy) if result.status != "passed"] == []


@pytest.mark.parametrize("name", LIES)
async def test_a_lie_is_told_by_the_cases_that_name_its_rule(target: Target, recordings: Recordings, name: str) -> None:
    told = LIES[name]
    near = [case for case in ALL_CASES if any(map(case.is_named_by, told.tried))]
    known = {} if "cancel" in told.tried else recordings  # a recorded answer would be no measure of the server's pace
    async with lying(target, told.lie, known) as proxy:
        results = await run(proxy, [case for case in near if case.id not in SLOW or case.id in told.caught_by])
    failed = {result.case.id: result.detail for result in results if result.status != "passed"}
    assert failed.keys() == set(told.caught_by), failed
