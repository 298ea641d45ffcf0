"""``trio-tlserve check`` says what a start comes to, in the numbers and the words of the start."""

from __future__ import annotations

import json
import os
import socket
import stat
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.client import metric, post
from tests.command import config_text
from tlserve import ServeConfig, serve
from tlserve.__main__ import main
from tlserve.log import LOGGER

ROOT = Path(__file__).parents[2]
LLAMA, SUCC = ROOT / "fixtures" / "tiny-llama", ROOT / "fixtures" / "succ"
CERT = ROOT / "tests" / "http" / "localhost.pem"
MIB = 1 << 20


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("TL_ENGINE__")]:
        monkeypatch.delenv(name)


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> int:
    """A machine with 12 MiB left, so that memory decides the number of blocks."""
    monkeypatch.setattr("tlserve.model.plan.available_memory", lambda: 12 * MIB)
    return 12 * MIB


def write(directory: Path, **values: Any) -> Path:
    path = directory / "runtime.toml"
    path.write_text(config_text(**values))
    return path


def document(path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    assert main(["check", str(path), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"max_model_len": 300, "max_num_seqs": 3, "block_size": 32, "kv_dtype": "f32"},
        {"kv_cache_mb": 1, "weights": "q4"},
        {"num_blocks": 30},
        {"speculative": {"method": "draft_model", "draft_model_dir": str(ROOT / "fixtures" / "tiny-qwen2")}},
    ],
)
async def test_its_numbers_are_those_of_a_server(
    values: dict[str, Any], memory: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = ServeConfig.for_model(LLAMA, **values)
    path = tmp_path / "runtime.toml"
    path.write_text(config.to_toml())
    async with serve(config) as server:
        started = server.overview
        states = [f'tl_engine_kv_blocks{{state="{state}"}}' for state in ("free", "used", "cached")]
        num_blocks = sum([await metric(server.health_addr, name) for name in states])
        tokens = (await post(server.http_addr, "/v1/tokenize", {"model": "tiny-llama", "text": ""})).json()
    assert await trio.to_thread.run_sync(main, ["check", str(path), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["num_blocks"], shown["max_model_len"]) == (num_blocks, tokens["max_model_len"])
    assert shown["available_bytes"] == started.available_bytes == memory
    for name in ("weights_bytes", "kv_bytes", "buffers_bytes", "draft_bytes", "isa"):
        assert shown[name] == getattr(started, name), name
    assert shown["num_blocks"] * shown["block_bytes"] == shown["kv_bytes"] <= memory
    assert shown["num_full_streams"] * shown["max_model_len"] <= shown["num_tokens"]
    assert shown["max_num_seqs"] * shown["tokens_each"] <= shown["num_tokens"]


def test_people_get_the_keys_the_model_the_memory_and_the_addresses(
    tmp_path: Path, memory: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TL_ENGINE__MAX_NUM_SEQS", "4")
    monkeypatch.setenv("TL_ENGINE__THREADS", "1")
    path = write(tmp_path, model_dir=str(LLAMA), model_id="mine")
    assert main(["check", str(path)]) == 0
    text = capsys.readouterr().out
    lines = text.splitlines()
    assert lines[0] == f"{path} would start"
    assert "set by file: model_dir, http_listen, health_listen, log_format, model_id" in lines
    assert "set by environment: max_num_seqs, threads" in lines
    assert "model      mine (llama, 78208 parameters, F32)" in lines
    assert f"files      {LLAMA}" in lines
    assert "text       vocabulary 257, tokenizer bytes, chat template default" in lines
    assert "context    2048 tokens; the model supports 2048" in lines
    assert "at once    4 requests of 2048 tokens" in lines
    assert "KV cache   512 blocks of 16 tokens: 8192 tokens of 256 B" in lines
    assert any(line.startswith("memory ") and line.endswith("of 12.0 MiB free") for line in lines)
    assert any(line.startswith("compute    1 thread, ") for line in lines)
    assert "API        127.0.0.1:0 (TLS off, API keys none)" in lines
    assert "warning" not in text


def test_a_model_is_checked_with_the_defaults_and_the_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TL_ENGINE__MODEL_DIR", "/nowhere")
    monkeypatch.setenv("TL_ENGINE__HTTP_LISTEN", "127.0.0.1:0")
    monkeypatch.setenv("TL_ENGINE__HEALTH_LISTEN", "127.0.0.1:0")
    assert main(["check", "--json", "--model-dir", str(SUCC)]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["model_id"], shown["architecture"], shown["has_own_template"]) == ("succ", "bigram", True)
    assert shown["sources"]["model_dir"] == "--model-dir"
    assert shown["sources"]["http_listen"] == "TL_ENGINE__HTTP_LISTEN"


# What would not start


@pytest.mark.usefixtures("memory")
@pytest.mark.parametrize(
    ("values", "status"),
    [
        ({"prefill_chunks": 1}, 2),
        ({"queue_capacity": 0}, 2),
        ({"max_model_len": 5000}, 2),
        ({"num_blocks": 10_000_000}, 2),
        ({"kv_cache_mb": 500}, 2),
        ({"api_keys_file": "/nowhere"}, 2),
        ({"cors_allow_origins": ["x"]}, 2),
        ({"tls_cert": "/nowhere", "tls_key": "/nowhere"}, 2),
        ({"tls_cert": str(CERT), "tls_key": "/etc/hostname"}, 2),
        ({"model_dir": "/nowhere"}, 3),
        ({"http_listen": "192.0.2.1:8000"}, 4),
    ],
)
def test_what_would_not_start_ends_with_the_status_and_the_line_of_the_start(
    values: dict[str, Any],
    status: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(LOGGER, "handlers", [])
    monkeypatch.setattr(LOGGER, "propagate", True)
    monkeypatch.setattr("tlserve.cli.serve.make_room_for", lambda num_connections: None)
    path = str(write(tmp_path, **values))
    assert main([path]) == status
    said = capsys.readouterr().err
    assert main(["check", path]) == status
    assert capsys.readouterr() == ("", said)
    assert said.startswith("trio-tlserve: ")


def test_a_draft_model_that_does_not_fit_is_refused_as_a_start_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "runtime.toml"
    path.write_text(
        config_text() + f'[engine.speculative]\nmethod = "draft_model"\ndraft_model_dir = {json.dumps(str(LLAMA))}\n'
    )
    assert main(["check", str(path)]) == 2
    assert "speculative.draft_model_dir: its vocab_size must be the model's 256, got 257" in capsys.readouterr().err


@pytest.mark.parametrize("command", [[], ["check"], ["config"]])
def test_without_a_file_and_a_model_there_is_nothing_to_do(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(command)
    assert caught.value.code == 2
    assert "give a runtime.toml or --model-dir PATH" in capsys.readouterr().err


@pytest.mark.parametrize("command", [[], ["check"], ["chat"], ["config"]])
def test_a_model_in_place_of_the_file_says_what_to_type(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a model.gguf"
    assert main([*command, str(path)]) == 2
    expected = f"trio-tlserve: {path}: is a model, not a configuration; give it as --model-dir '{path}'\n"
    assert capsys.readouterr().err == expected


def test_a_model_goes_over_that_of_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, model_dir="/nowhere", max_num_seqs=3)
    assert main(["check", str(path), "--model-dir", str(SUCC)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{path} would start"
    assert any(line.startswith("set by option:") and line.endswith(" model_dir") for line in lines)
    assert any(line.startswith("at once    3 requests") for line in lines)


def test_a_model_alone_is_what_would_start(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--model-dir", str(SUCC)]) == 0
    assert capsys.readouterr().out.startswith(f"{SUCC} would start\n")


@pytest.mark.usefixtures("memory")
def test_a_fault_that_shows_late_names_the_variable_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TL_ENGINE__KV_CACHE_MB", "500")
    assert main(["check", str(write(tmp_path))]) == 2
    assert capsys.readouterr().err.startswith("trio-tlserve: TL_ENGINE__KV_CACHE_MB = 500: needs ")


def test_one_address_for_both_ports_is_refused_as_a_start_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{sock.getsockname()[1]}"
    assert main(["check", str(write(tmp_path, http_listen=address, health_listen=address))]) == 4
    expected = f"trio-tlserve: health_listen = '{address}': is the address of http_listen too; "
    assert capsys.readouterr().err.startswith(expected)


# What its operator may not have meant


def warnings(path: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    found: list[str] = document(path, capsys)["warnings"]
    assert main(["check", str(path)]) == 0
    assert capsys.readouterr().out.count("\nwarning: ") == len(found)
    return found


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, []),
        ({"http_listen": "[::1]:0"}, []),
        ({"http_listen": "localhost:0"}, []),
        ({"http_listen": ":0"}, ["http_listen = ':0': other machines can reach it, and no api_keys_file is set"]),
        (
            {"num_blocks": 3},
            [
                "max_model_len = 4096: the KV cache holds 48 tokens; a longer request is refused",
                "max_num_seqs = 32: 3 KV blocks hold that many requests at most",
            ],
        ),
        (
            {"num_blocks": 32, "max_model_len": 600},
            ["max_model_len = 600: the KV cache holds 512 tokens; a longer request is refused"],
        ),
    ],
)
def test_what_starts_but_may_not_be_meant_is_a_warning(
    values: dict[str, Any], expected: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert warnings(write(tmp_path, **values), capsys) == expected


def test_limits_of_the_machine_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.setattr("resource.getrlimit", lambda kind: (1024, 4096))
    assert warnings(write(tmp_path, threads=3, max_connections=5000), capsys) == [
        "threads = 3: this process has 2 cores",
        "max_connections = 5000: the limit of open files is 4096",
    ]


def test_keys_in_the_clear_and_for_everybody_to_read_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("secret\n")
    keys.chmod(0o644)
    path = write(tmp_path, http_listen="0.0.0.0:0", api_keys_file=str(keys))
    assert warnings(path, capsys) == [
        "http_listen = '0.0.0.0:0': API keys are sent in the clear, for tls_cert is not set",
        f"api_keys_file = '{keys}': every user of this machine can read or change it",
    ]
    keys.chmod(stat.S_IRUSR | stat.S_IRGRP)
    key = tmp_path / "key.pem"
    key.write_bytes(CERT.read_bytes())
    key.chmod(0o600)
    path = write(tmp_path, http_listen="0.0.0.0:0", api_keys_file=str(keys), tls_cert=str(CERT), tls_key=str(key))
    assert warnings(path, capsys) == []


def test_a_port_in_use_is_a_warning_for_it_may_be_that_of_the_server_to_be_replaced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        address = f"127.0.0.1:{sock.getsockname()[1]}"
        (warning,) = warnings(write(tmp_path, http_listen=address), capsys)
    assert warning.startswith(f"http_listen = '{address}': Address already in use; ")
