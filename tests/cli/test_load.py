"""``trio-tlserve load`` against a server that keeps count of what it was asked."""

from __future__ import annotations

import importlib.util
import itertools
import json
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
import trio
import trio.testing

from tests.cli.fake_api import FakeApi, fake_api
from tlserve.cli import load, load_run
from tlserve.cli.load_prompts import PROBE_WORDS, Prompts
from tlserve.cli.load_run import Plan, run_load
from tlserve.cli.load_target import Answer, Target
from tlserve.http.client import ConnectionFailed, Origin

NUM_PROBES = len(PROBE_WORDS)
SMALL = ("--prompt-tokens", "20", "--max-tokens", "6")


@pytest.fixture
async def api() -> AsyncIterator[FakeApi]:
    async with fake_api() as api:
        yield api


async def run(api: FakeApi, *arguments: str, status: int = 0) -> None:
    """The command, as its own program would run it: with an event loop of its own."""
    assert await trio.to_thread.run_sync(load.main, ["--base-url", api.base_url, *SMALL, *arguments]) == status


async def figures(api: FakeApi, capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> Any:
    await run(api, "--json", *arguments, status=status)
    return json.loads(capsys.readouterr().out)


async def test_a_closed_loop_sends_what_was_asked_and_counts_what_came(
    api: FakeApi, capsys: pytest.CaptureFixture[str]
) -> None:
    report = await figures(api, capsys, "--concurrency", "4", "--requests", "10")
    assert (report["num_requests"], report["num_complete"], report["errors"]) == (10, 10, {})
    assert (report["prompt_tokens"], report["completion_tokens"], report["num_events"]) == (200, 60, 60)
    assert (report["model"], report["endpoint"], report["concurrency"]) == ("fake", "chat", 4)
    assert set(report["ttft_ms"]) == set(report["itl_ms"]) == set(report["latency_ms"]) == {"p50", "p90", "p99"}
    assert len(api.bodies) == NUM_PROBES + 10


async def test_the_body_is_one_that_any_server_of_the_api_takes(api: FakeApi) -> None:
    await run(api, "--requests", "1", "--endpoint", "completions", "--model", "mine", "--api-key", "secret")
    body = api.bodies[-1]
    assert len(body.pop("prompt").split()) == 20
    assert body == {
        "model": "mine",
        "max_tokens": 6,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    assert api.headers[-1]["authorization"] == "Bearer secret"
    assert api.num_model_lists == 0


async def test_no_two_prompts_are_alike_and_the_same_seed_sends_the_same(api: FakeApi) -> None:
    sent = []
    for seed in ("1", "1", "2"):
        api.bodies.clear()
        await run(api, "--requests", "5", "--seed", seed)
        sent.append([body["messages"][0]["content"] for body in api.bodies[NUM_PROBES:]])
    assert len(set(sent[0])) == 5
    assert sent[0] == sent[1]
    assert not set(sent[0]) & set(sent[2])


async def test_a_shared_prefix_is_shared_and_no_more(api: FakeApi) -> None:
    await run(api, "--requests", "5", "--shared-prefix", "12", "--endpoint", "completions")
    prompts = [body["prompt"].split() for body in api.bodies[NUM_PROBES:]]
    assert len({tuple(prompt[:12]) for prompt in prompts}) == 1
    assert len({tuple(prompt[12:]) for prompt in prompts}) == 5


@pytest.mark.parametrize(
    ("fate", "name"),
    [
        ("busy", "429"),
        ("error event", "error event"),
        ("cut short", "cut short"),
        ("nonsense", "not a chunk of this API"),
        ("hang", "timeout"),
    ],
)
async def test_failures_are_counted_by_kind_and_leave_the_figures_of_the_others(
    api: FakeApi, capsys: pytest.CaptureFixture[str], fate: str, name: str
) -> None:
    api.fate = lambda index: fate if index in (NUM_PROBES, NUM_PROBES + 2) else None
    report = await figures(api, capsys, "--requests", "4", "--timeout", "1" if fate == "hang" else "60")
    assert report["errors"] == {name: 2}
    assert (report["num_complete"], report["completion_tokens"]) == (2, 12)


async def test_it_fails_when_nothing_was_answered(api: FakeApi, capsys: pytest.CaptureFixture[str]) -> None:
    api.fate = lambda index: "busy" if index >= NUM_PROBES else None
    report = await figures(api, capsys, "--requests", "3", status=1)
    assert (report["errors"], report["ttft_ms"], report["tokens_per_second"]) == ({"429": 3}, None, 0.0)


async def test_a_server_that_refuses_the_probe_is_not_measured(
    api: FakeApi, capsys: pytest.CaptureFixture[str]
) -> None:
    api.fate = lambda index: "busy"
    await run(api, status=1)
    assert 'failed: 429: {"error":{}}' in capsys.readouterr().err
    assert len(api.bodies) == 1


def test_a_server_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert load.main(["--base-url", "http://127.0.0.1:1/v1"]) == 1
    assert "127.0.0.1:1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (["--base-url", "localhost:8000"], "not an http:// or https:// URL"),
        (["--base-url", "http://a", "--concurrency", "0"], "must be an integer of 1 or more, got '0'"),
        (["--base-url", "http://a", "--rate", "0"], "must be a number above 0, got '0'"),
        (["--base-url", "http://a", "--rate", "1", "--concurrency", "2"], "not allowed with"),
        (["--base-url", "http://a", "--requests", "1", "--duration", "2"], "not allowed with"),
        (["--base-url", "http://a", "--shared-prefix", "129"], "must be at most --prompt-tokens, 128"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(
    arguments: list[str], fault: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        load.main(arguments)
    assert exit_info.value.code == 2
    assert fault in capsys.readouterr().err


def test_a_picture_without_matplotlib_is_refused_before_anything_is_measured(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        load.main(["--base-url", "http://127.0.0.1:1", "--plot", "out.png"])
    assert "pip install '.[bench]'" in capsys.readouterr().err


async def test_a_picture_is_drawn(api: FakeApi, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    await run(api, "--requests", "2", "--plot", str(tmp_path / "out.png"))
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


async def test_the_table_has_the_figures_for_people(api: FakeApi, capsys: pytest.CaptureFixture[str]) -> None:
    await run(api, "--requests", "2")
    out = capsys.readouterr().out
    assert "2 of 2 complete" in out
    assert "time to first token" in out


def target(api: FakeApi) -> Target:
    return Target(origin=Origin.parse(api.base_url), endpoint="completions", model="fake")


async def test_an_open_loop_follows_its_clock_and_not_the_answers(api: FakeApi) -> None:
    """Arrivals are drawn from the seed; that the first request never ends delays none of them."""
    api.fate = lambda index: "hang" if index == 0 else None
    answers: list[Answer] = []
    plan = Plan(max_tokens=2, rate=1000.0, num_requests=20, seed=7)
    with trio.move_on_after(60) as scope:

        def take(answer: Answer) -> None:
            answers.append(answer)
            if len(answers) == 19:
                scope.cancel()

        await run_load(target(api), Prompts(0, 4), plan, take)
    draw = random.Random(7)
    gaps = [draw.expovariate(1000.0) for _ in range(19)][1:]  # the first gap lies before the second request
    starts = sorted(answer.start for answer in answers)
    assert [later - start for start, later in itertools.pairwise(starts)] == pytest.approx(gaps, abs=1e-6)


async def test_a_duration_ends_the_sending_and_waits_for_the_rest(api: FakeApi) -> None:
    answers: list[Answer] = []
    with trio.fail_after(30):
        await run_load(target(api), Prompts(0, 4), Plan(max_tokens=2, concurrency=2, duration=0.2), answers.append)
    assert [answer.error for answer in answers if answer.error is not None] == []
    assert len(answers) >= 2


@pytest.fixture
def slow_refusals(monkeypatch: pytest.MonkeyPatch) -> float:
    """Connections fail after so many seconds, on the clock of the test and without a socket."""
    seconds = 1.0

    async def refuse(origin: Origin) -> NoReturn:
        await trio.sleep(seconds)
        raise ConnectionFailed("refused")

    monkeypatch.setattr(load_run, "connect", refuse)
    return seconds


@pytest.mark.parametrize(
    ("plan", "num_sent"),
    [
        (Plan(max_tokens=2, rate=0.1, num_requests=5), 5),
        (Plan(max_tokens=2, rate=0.1, num_requests=1), 1),
        (Plan(max_tokens=2, rate=0.1, duration=60.0), 7),
        (Plan(max_tokens=2, rate=0.1, duration=0.5), 1),
    ],
    ids=["5 requests", "1 request", "60 seconds", "half a second"],
)
async def test_an_open_loop_waits_after_its_last_request_only_for_what_is_in_flight(
    autojump_clock: trio.testing.MockClock, slow_refusals: float, plan: Plan, num_sent: int
) -> None:
    answers: list[Answer] = []
    target = Target(origin=Origin("a", 80, False, ""), endpoint="chat", model="m")
    begin = trio.current_time()
    await run_load(target, Prompts(0, 4), plan, answers.append)
    draw = random.Random(plan.seed)
    dues = list(itertools.accumulate((draw.expovariate(0.1) for _ in range(num_sent - 1)), initial=begin))
    assert [answer.start for answer in answers] == pytest.approx(dues)
    assert trio.current_time() == pytest.approx(dues[-1] + slow_refusals)


async def test_workers_keep_their_connections(api: FakeApi) -> None:
    answers: list[Answer] = []
    await run_load(target(api), Prompts(0, 4), Plan(max_tokens=2, concurrency=3, num_requests=9), answers.append)
    assert all("connection" not in headers or headers["connection"] != "close" for headers in api.headers)
    assert [answer.error for answer in answers] == [None] * 9
