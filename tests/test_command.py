"""``trio-tlserve`` as an operator meets it: its exit status, its signals, its one line of complaint, its log."""

from __future__ import annotations

import json
import resource
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.client import DONE, connect, get, post
from tests.command import COMMAND, ROOT, SUCC, config_text, running
from tlserve import ServeConfig
from tlserve.__main__ import main
from tlserve.cli import process
from tlserve.http.limits import MAX_REFUSALS
from tlserve.kernels import jit
from tlserve.log import LOGGER

CHAT = "/v1/chat/completions"
SECRET = "a-secret-prompt"
# Steps of 5 ms, so that something can happen while an answer is under way.
SLOW_STEPS = """
import sys, time
from tlserve.model.runner import BigramRunner
forward = BigramRunner.forward
def slow(self, batch):
    time.sleep(0.005)
    return forward(self, batch)
BigramRunner.forward = slow
from tlserve.__main__ import main
sys.exit(main())
"""
# The first prompt that holds an "x" ends the engine.
BROKEN_STEPS = """
import sys
from tlserve.model.runner import BigramRunner
forward = BigramRunner.forward
def broken(self, batch):
    if ord("x") in batch.token_ids:
        raise ZeroDivisionError("the engine broke")
    return forward(self, batch)
BigramRunner.forward = broken
from tlserve.__main__ import main
sys.exit(main())
"""
ENDLESS_LOADING = """
import sys, threading, tlserve.server
def load(config, progress):
    progress("forever", 0, 1)
    threading.Event().wait()
tlserve.server.load = load
from tlserve.__main__ import main
sys.exit(main())
"""


def script(text: str, *arguments: str | Path) -> list[str | Path]:
    return [sys.executable, "-c", text, *arguments]


def chat(content: str = "a", **fields: Any) -> dict[str, Any]:
    return {"model": "succ", "messages": [{"role": "user", "content": content}], "temperature": 0} | fields


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "runtime.toml"
    path.write_text(config_text())
    return path


# Signals


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_the_first_signal_drains_and_the_exit_status_is_0(config: Path, number: signal.Signals) -> None:
    async with running(script(SLOW_STEPS, config)) as command:
        api, health = await command.wait_ready()
        async with connect(api) as client:
            await client.start("POST", CHAT, chat(max_tokens=40, stream=True))
            command.send_signal(number)
            await command.wait_for('"draining"')
            assert (await get(health, "/readyz")).status == 503
            events = [event async for event in client.events()]
        assert events[-1] == DONE
        assert events[-2]["choices"][0]["finish_reason"] == "length"
        assert await command.wait() == 0
    assert command.records[-1]["message"] == "stopped"
    assert "Traceback" not in command.stderr.decode()


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
async def test_a_second_signal_ends_it_at_once(config: Path, number: signal.Signals, status: int) -> None:
    async with running(script(SLOW_STEPS, config)) as command:
        api, _ = await command.wait_ready()
        async with connect(api) as client:
            await client.start("POST", CHAT, chat(max_tokens=4000, stream=True))
            command.send_signal(signal.SIGTERM)
            await command.wait_for('"draining"')
            command.send_signal(number)
            with trio.fail_after(5):  # the stream would take 20 s more
                assert await command.wait() == status
    last = command.records[-1]
    assert (last["message"], last["signal"]) == ("ended by a second signal", number.name)


async def test_a_signal_while_loading_ends_it_with_0(config: Path) -> None:
    async with running(script(ENDLESS_LOADING, config)) as command:
        await command.wait_for("forever")
        command.send_signal(signal.SIGTERM)
        with trio.fail_after(5):
            assert await command.wait() == 0
    assert command.records[-1]["message"] == "stopped while loading"


def test_control_c_before_there_is_anything_to_drain_is_130_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(argv: Sequence[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("tlserve.cli.serve.main", interrupted)
    assert main(["runtime.toml"]) == 130
    assert capsys.readouterr().err == ""


async def test_a_drain_that_takes_too_long_ends_streams_with_an_error_and_exits_0(tmp_path: Path) -> None:
    (tmp_path / "runtime.toml").write_text(config_text(drain_timeout_ms=100))
    async with running(script(SLOW_STEPS, tmp_path / "runtime.toml")) as command:
        api, _ = await command.wait_ready()
        async with connect(api) as client:
            await client.start("POST", CHAT, chat(max_tokens=4000, stream=True))
            command.send_signal(signal.SIGTERM)
            events = [event async for event in client.events()]
        assert events[-1]["error"]["code"] == "shutting_down"
        assert await command.wait() == 0


async def test_a_step_that_fails_ends_it_with_70(config: Path) -> None:
    async with running(script(BROKEN_STEPS, config)) as command:
        api, health = await command.wait_ready()
        assert (await post(api, CHAT, chat(max_tokens=3))).status == 200
        assert (await post(api, CHAT, chat("x", max_tokens=3))).status == 500
        assert (await get(health, "/healthz")).status == 503
        with trio.fail_after(10):
            assert await command.wait() == 70
    critical = next(json.loads(line) for line in command.lines if '"critical"' in line)
    assert "the engine broke" in critical["exception"]
    assert command.lines[-1] == "trio-tlserve: a step of the engine failed; the log has the traceback"


async def test_a_disk_without_room_for_a_kernel_costs_one_warning(tmp_path: Path) -> None:
    """No file may grow past a block, as on a full disk: it compiles, says so once, serves, leaves no part behind."""
    cache = tmp_path / jit.cache_key()
    # The last that loading looks for, so that no other has to be compiled as well.
    shutil.copytree(jit.cache_root() / jit.cache_key(), cache, ignore=shutil.ignore_patterns("pack-F32-*"))
    before = sorted(cache.iterdir())
    config = tmp_path / "runtime.toml"
    config.write_text(config_text(model_dir=str(ROOT / "fixtures/tiny-llama")))
    limited: list[str | Path] = ["sh", "-c", 'ulimit -f 1; exec "$@"', "sh", *COMMAND, config]
    async with running(limited, TLSERVE_CACHE_DIR=str(tmp_path)) as command:
        api, _ = await command.wait_ready()
        assert (await post(api, CHAT, chat(model="tiny-llama", max_tokens=3))).status == 200
        command.send_signal(signal.SIGTERM)
        assert await command.wait() == 0
    warnings = [record["message"] for record in command.records if record["level"] == "warning"]
    assert len(warnings) == 1
    assert warnings[0].startswith("kernel cache cannot be written, kernels are compiled at each start: ")
    assert sorted(cache.iterdir()) == before


# What it refuses to start with


@pytest.fixture
def own_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a command that runs in this process: what it changes of the process is put back."""
    monkeypatch.setattr(LOGGER, "handlers", [])
    monkeypatch.setattr(LOGGER, "propagate", True)
    monkeypatch.setattr("tlserve.cli.serve.make_room_for", lambda num_connections: None)


@pytest.mark.usefixtures("own_log")
@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"prefill_chunks": 1}, "prefill_chunks: is no key of the [engine] table; did you mean prefill_chunk?"),
        ({"queue_capacity": 0}, "queue_capacity = 0: "),
        ({"max_model_len": 5000}, "max_model_len = 5000: the model supports up to 4096"),
        ({"api_keys_file": "/nowhere"}, "api_keys_file = '/nowhere': cannot be read: No such file or directory"),
        ({"cors_allow_origins": ["x"]}, "cors_allow_origins = 'x': must be "),
        ({"tls_cert": "/nowhere", "tls_key": "/nowhere"}, "tls_cert = '/nowhere': cannot be read: No such file"),
    ],
)
def test_a_fault_of_the_configuration_is_one_line_and_2(
    tmp_path: Path, values: dict[str, Any], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "runtime.toml"
    path.write_text(config_text(**values))
    assert main([str(path)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"trio-tlserve: {path}: {text}")
    assert printed.err.count("\n") == 1


@pytest.mark.parametrize("arguments", [[], ["a.toml", "--config", "b.toml"], ["--nothing"]])
def test_a_wrong_command_line_is_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage: trio-tlserve" in capsys.readouterr().err


def refuse(path: Path) -> tuple[int, str]:
    """The exit status of the command, which ends by itself, and its stderr."""
    ended = subprocess.run([*COMMAND, path], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert ended.stdout == ""
    return ended.returncode, ended.stderr


def test_a_file_that_is_not_there_is_2(tmp_path: Path) -> None:
    path = tmp_path / "none.toml"
    code, stderr = refuse(path)
    assert (code, stderr.count("\n")) == (2, 1)
    assert stderr.startswith(f"trio-tlserve: {path}: cannot be read: ")


def test_a_model_that_cannot_be_loaded_is_3(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "bigram", "vocab_size": 256}')
    (tmp_path / "runtime.toml").write_text(config_text(model_dir=str(model)))
    code, stderr = refuse(tmp_path / "runtime.toml")
    assert (code, stderr.count("\n")) == (3, 1)
    assert str(model) in stderr


def test_a_port_in_use_is_4(tmp_path: Path) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        address = f"127.0.0.1:{sock.getsockname()[1]}"
        (tmp_path / "runtime.toml").write_text(config_text(http_listen=address))
        code, stderr = refuse(tmp_path / "runtime.toml")
    assert code == 4
    hint = "TL_ENGINE__HTTP_LISTEN sets another address"
    assert stderr == f"trio-tlserve: http_listen = '{address}': Address already in use; {hint}\n"


# Configuration


async def test_the_file_may_be_an_option_and_the_environment_overrides_it(config: Path) -> None:
    async with running([*COMMAND, "--config", config], TL_ENGINE__MODEL_ID="renamed") as command:
        api, _ = await command.wait_ready()
        assert (await get(api, "/v1/models")).json()["data"][0]["id"] == "renamed"
        command.send_signal(signal.SIGTERM)
        assert await command.wait() == 0


def test_config_prints_what_is_in_force(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TL_ENGINE__QUEUE_CAPACITY", "7")
    printed = subprocess.run(
        [*COMMAND, "config", str(config)], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert printed.stderr == ""
    shown = ServeConfig.from_toml(printed.stdout, {})
    assert (shown.model_dir, shown.queue_capacity) == (SUCC, 7)


# stderr and the log


async def test_a_reader_of_stderr_that_goes_away_is_no_reason_to_end(tmp_path: Path) -> None:
    (tmp_path / "runtime.toml").write_text(config_text())
    async with running([*COMMAND, tmp_path / "runtime.toml"]) as command:
        api, _ = await command.wait_ready()
        assert command.process.stderr is not None
        await command.process.stderr.aclose()
        for _ in range(3):
            assert (await post(api, CHAT, chat(max_tokens=3))).status == 200
        command.send_signal(signal.SIGTERM)
        assert await command.wait() == 0


async def test_it_starts_without_a_stderr(tmp_path: Path) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        api = ("127.0.0.1", sock.getsockname()[1])
    path = tmp_path / "runtime.toml"
    path.write_text(config_text(http_listen=f"{api[0]}:{api[1]}", log_format="text"))
    async with running(["sh", "-c", 'exec "$@" 2>&-', "sh", *COMMAND, path]) as command:
        with trio.fail_after(30):
            while True:  # there is nobody to tell us
                try:
                    status = (await post(api, CHAT, chat(max_tokens=3))).status
                except OSError:
                    await trio.sleep(0.05)
                    continue
                if status == 200:
                    break
        command.send_signal(signal.SIGTERM)
        assert await command.wait() == 0


async def test_the_log_has_one_line_a_request_and_no_text_of_anybody(config: Path) -> None:
    async with running([*COMMAND, config]) as command:
        api, _ = await command.wait_ready()
        body = chat(f"{SECRET} a", max_tokens=3)
        await post(api, CHAT, body, [("X-Request-Id", "mine-1")])
        await post(api, CHAT, body | {"stream": True}, [("X-Request-Id", "mine-2")])
        await post(api, CHAT, body | {"temperature": 9}, [("X-Request-Id", "mine-3"), ("Authorization", SECRET)])
        await get(api, f"/{SECRET}", [("X-Request-Id", "mine-4")])
        async with connect(api) as client:
            await client.start("POST", CHAT, body | {"max_tokens": 4000, "stream": True}, [("X-Request-Id", "mine-5")])
        await command.wait_for('"mine-5"')
        command.send_signal(signal.SIGTERM)
        assert await command.wait() == 0
    assert SECRET not in command.stderr.decode()
    lines = sorted((record for record in command.records if record["message"] == "request"), key=itemgetter("id"))
    assert [line["id"] for line in lines] == [f"mine-{number}" for number in range(1, 6)]
    assert [line["status"] for line in lines] == [200, 200, 400, 404, 200]
    assert [line["route"] for line in lines] == [CHAT, CHAT, CHAT, "none", CHAT]
    assert [line["outcome"] for line in lines] == ["complete"] * 4 + ["client_left"]
    num_prompt = len(body["messages"][0]["content"])
    for line in lines[:2]:
        assert (line["method"], line["finish"]) == ("POST", "length")
        assert (line["prompt_tokens"], line["completion_tokens"]) == (num_prompt, 3)
        assert line["cached_tokens"] in (0, 16)
        assert 0 <= line["queue_seconds"] <= line["first_token_seconds"] <= line["seconds"]


HOSTILE = "x\r\n2026-01-31T12:00:00.000+00:00 INFO request id=forged\r\n"


@pytest.mark.parametrize("log_format", ["text", "json"])
async def test_nothing_a_client_sends_forges_a_line(tmp_path: Path, log_format: str) -> None:
    path = tmp_path / "runtime.toml"
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        api = ("127.0.0.1", sock.getsockname()[1])
    path.write_text(config_text(http_listen=f"{api[0]}:{api[1]}", log_format=log_format))
    async with running([*COMMAND, path]) as command:
        await command.wait_for("serving")
        await post(api, CHAT, chat(HOSTILE, max_tokens=1, model=HOSTILE))
        await post(api, CHAT, chat(HOSTILE, max_tokens=1, user=HOSTILE))
        await get(api, "/v1/models/x%0d%0a2026-01-31T12:00:00.000+00:00%20INFO%20request%20id=forged")
        await get(api, "/v1/models", [("X-Request-Id", "a id=forged"), ("User-Agent", 'forged" id=forged')])
        async with connect(api) as client:
            await client.stream.send_all(
                b"GET / HTTP/1.1\r\nHost: x\r\nX-Request-Id: a\rINFO request id=forged\r\n\r\n"
            )
            assert (await client.stream.receive_some()).startswith(b"HTTP/1.1 400 ")
        async with connect(api) as client:
            await client.stream.send_all(b"INFO\x1b[0mrequest id=forged HTTP/1.1\r\n\r\n")
            assert (await client.stream.receive_some()).startswith(b"HTTP/1.1 400 ")
        command.send_signal(signal.SIGTERM)
        assert await command.wait() == 0
    text = command.stderr.decode()
    assert "forged" not in text
    assert "\x1b" not in text
    assert sum("request" in line and "outcome" in line for line in command.lines) == 6


# Room for connections


@pytest.mark.parametrize(
    ("soft", "hard", "expected", "is_told"),
    [
        (1024, 4096, 1024 + MAX_REFUSALS + process.OWN_FILES, False),
        (1024, 1200, 1200, True),
        (256, resource.RLIM_INFINITY, 1024 + MAX_REFUSALS + process.OWN_FILES, False),
        (100_000, 200_000, None, False),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, None, False),
    ],
)
def test_the_limit_of_open_files_is_raised_as_far_as_it_goes(
    soft: int,
    hard: int,
    expected: int | None,
    is_told: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: asked.append(limits))
    process.make_room_for(1024)
    assert asked == ([] if expected is None else [(expected, hard)])
    assert [record.getMessage() for record in caplog.records] == (
        ["max_connections needs more open files than the limit allows"] if is_told else []
    )


async def test_more_connections_fit_than_the_soft_limit_it_was_started_with(config: Path) -> None:
    """Forty are opened where the limit at the start was thirty-two files."""
    async with running(["sh", "-c", 'ulimit -Sn 32; exec "$@"', "sh", *COMMAND, config]) as command:
        api, _ = await command.wait_ready()
        async with trio.open_nursery() as nursery:
            opened = 0
            everybody = trio.Event()

            async def open_one() -> None:
                nonlocal opened
                async with connect(api) as client:
                    assert (await client.request("GET", "/healthz")).status == 200
                    opened += 1
                    if opened == 40:
                        everybody.set()
                    await everybody.wait()

            for _ in range(40):
                nursery.start_soon(open_one)
        command.send_signal(signal.SIGTERM)
        assert await command.wait() == 0
