"""``trio-tlserve bench``: what each test makes the engine compute, and the form of the report."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.engine import reference_sampler
from tests.fakes import ScriptedModel
from tlserve.cli import bench
from tlserve.cli.bench_tests import Batched, Bench, Single
from tlserve.config import EngineConfig
from tlserve.engine.engine import Engine

TINY = Path(__file__).parents[2] / "fixtures" / "tiny-llama"
BLOCK_SIZE = 4


def steps(test: Single | Batched, *, max_batch_tokens: int = 64) -> list[tuple[int, int]]:
    """Tokens and drawn tokens of each step that a test takes."""
    model = ScriptedModel(num_blocks=64, block_size=BLOCK_SIZE)
    config = EngineConfig(prefix_cache="radix", block_size=BLOCK_SIZE, max_batch_tokens=max_batch_tokens)
    engine = Engine(model, config, max_waiting=64, sample=reference_sampler.sample)
    measured = Bench(engine, model.vocab_size)
    if isinstance(test, Single):
        measured.single(test)
    else:
        measured.batched(test)
    return [(len(batch.token_ids), len(batch.logits_rows)) for batch in model.batches]


def test_a_prompt_is_read_at_once_and_draws_one_token() -> None:
    assert steps(Single(num_prompt=20, num_generated=0)) == [(20, 1)]


def test_a_generation_computes_one_token_a_step() -> None:
    assert steps(Single(num_prompt=0, num_generated=5)) == [(1, 1)] * 5


@pytest.mark.parametrize("depth", [12, 14])
def test_a_depth_is_computed_before_and_not_again(depth: int) -> None:
    assert steps(Single(0, 3, depth)) == [(depth, 1), *[(1, 1)] * 3]
    assert steps(Single(8, 0, depth)) == [(depth, 1), (8, 1)]


def test_a_batch_reads_all_prompts_and_then_continues_them_together() -> None:
    assert steps(Batched(num_streams=3, num_prompt=8, num_generated=4)) == [(24, 3), *[(3, 3)] * 4]


def test_the_names_are_those_of_llama_bench() -> None:
    assert Single(512, 0).name == "pp512"
    assert Single(0, 128, 4096).name == "tg128 @ d4096"


OPTIONS = ["-p", "16", "-n", "4", "-d", "0,16", "-r", "2", "-npl", "1,2", "-npp", "8", "-ntg", "4", "--threads", "1"]


def test_the_report_has_a_record_for_each_test(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["--model-dir", str(TINY), *OPTIONS, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["model"], report["threads"]) == ("tiny-llama", 1)
    assert [test["test"] for test in report["tests"]] == ["pp16", "tg4", "pp16 @ d16", "tg4 @ d16"]
    for test in report["tests"]:
        assert len(test["samples_ts"]) == 2
        assert min(test["samples_ts"]) <= test["avg_ts"] <= max(test["samples_ts"])
    assert [batch["pl"] for batch in report["batched"]] == [1, 2]
    for batch in report["batched"]:
        assert batch["speed_tg"] == pytest.approx(batch["pl"] * 4 / batch["t_tg"])
        assert batch["t"] == pytest.approx(batch["t_pp"] + batch["t_tg"])


def test_the_table_and_the_picture_show_the_same(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "bench.png"
    assert bench.main(["--model-dir", str(TINY), *OPTIONS, "--plot", str(picture)]) == 0
    assert "| tg4 @ d16 " in capsys.readouterr().out
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("fault", [["-p", "-1"], ["-n", "x"], ["-r", "0"]])
def test_counts_that_make_no_sense_are_refused(fault: list[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        bench.main(["--model-dir", str(TINY), *fault])
    assert exit_info.value.code == 2
