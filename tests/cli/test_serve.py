"""What a start says once the server is ready: to people, to programs, and to nobody who embeds it."""

from __future__ import annotations

import json
import logging
import shlex
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.client import DONE, connect
from tests.command import COMMAND, SUCC, config_text, running
from tlserve import ServeConfig, serve
from tlserve.cli.serve import banner

CERT = Path(__file__).parents[1] / "http" / "localhost.pem"


async def test_people_are_told_what_runs_where_with_a_line_that_works(tmp_path: Path) -> None:
    path = tmp_path / "runtime.toml"
    path.write_text(config_text(log_format="text", threads=1, max_num_seqs=4))
    async with running([*COMMAND, path]) as command:
        curl = shlex.split(await command.wait_for("curl -N "))
        assert curl[:2] == ["curl", "-N"]
        url, _, body = curl[2:5]
        host, port = url.removeprefix("http://").split("/")[0].split(":")
        async with connect((host, int(port))) as client:
            reply = await client.start("POST", "/v1/chat/completions", json.loads(body))
            assert reply.status == 200
            assert [event async for event in client.events()][-1] == DONE
        command.send_signal(signal.SIGTERM)
        assert await command.wait() == 0
    text = command.stderr.decode()
    base_url = url.removesuffix("/chat/completions")
    for expected in (
        f"serving succ at {base_url}\n",
        "  model      succ (bigram, 65536 parameters, F32)\n",
        "  context    4096 tokens; the model supports 4096\n",
        "  at once    4 requests of 4096 tokens\n",
        "  KV cache   1024 blocks of 16 tokens: 16384 tokens of 4 B\n",
        "  compute    1 thread, ",
        f"  API        {base_url} (TLS off, API keys none)\n",
        "/healthz (metrics too)\n",
    ):
        assert expected in text
    assert "\x1b" not in text


async def test_a_model_is_served_without_a_file() -> None:
    free_ports = {"TL_ENGINE__HTTP_LISTEN": "127.0.0.1:0", "TL_ENGINE__HEALTH_LISTEN": "127.0.0.1:0"}
    async with running([*COMMAND, "--model-dir", SUCC], **free_ports) as command:
        assert "serving succ at http://127.0.0.1:" in await command.wait_for("serving ")
        command.send_signal(signal.SIGTERM)
        assert await command.wait() == 0


def with_access(tmp_path: Path) -> dict[str, Any]:
    keys = tmp_path / "keys"
    keys.write_text("secret\n")
    return {"api_keys_file": str(keys), "tls_cert": str(CERT), "tls_key": str(CERT)}


async def test_tls_and_keys_are_part_of_the_line_to_try(tmp_path: Path) -> None:
    async with serve(ServeConfig.for_model(SUCC, **with_access(tmp_path))) as server:
        text = banner(server)
    assert f"API        {server.base_url} (TLS on, API keys asked for)" in text
    curl = next(line for line in text.splitlines() if "curl" in line)
    words = ["curl", "--cacert", str(CERT), "-N", f"{server.base_url}/chat/completions"]
    assert shlex.split(curl)[:7] == [*words, "-H", "Authorization: Bearer $API_KEY"]
    assert '"Authorization: Bearer $API_KEY"' in curl, "the shell fills in the key"
    assert "secret" not in text
    assert server.base_url.startswith("https://")


async def test_a_log_in_json_has_one_record_with_the_same_fields(tmp_path: Path) -> None:
    path = tmp_path / "runtime.toml"
    path.write_text(config_text(threads=1))
    async with running([*COMMAND, path]) as command:
        record = json.loads(await command.wait_for('"serving"'))
        command.send_signal(signal.SIGTERM)
        assert await command.wait() == 0
    assert [line["message"] for line in command.records].count("serving") == 1
    assert {key: record[key] for key in ("model", "architecture", "parameters", "formats", "threads", "tls")} == {
        "model": "succ",
        "architecture": "bigram",
        "parameters": 65536,
        "formats": ["F32"],
        "threads": 1,
        "tls": False,
    }
    assert record["total_bytes"] == record["weights_bytes"] + record["kv_bytes"]
    assert record["num_blocks"] * record["block_bytes"] == record["kv_bytes"]
    assert record["max_model_len"] == 4096
    assert record["api_keys"] is False
    assert record["url"].endswith("/v1")
    assert record["isa"]


async def test_a_program_that_embeds_the_server_gets_nothing_on_its_streams(capfd: pytest.CaptureFixture[str]) -> None:
    async with serve(ServeConfig.for_model(SUCC)):
        pass
    assert capfd.readouterr() == ("", "")


async def test_the_log_says_when_kernels_are_compiled_and_only_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A machine that never compiled any has no directory for them."""
    monkeypatch.setattr("tlserve.loading.cache_root", lambda: tmp_path)
    monkeypatch.setattr("tlserve.loading.cache_key", lambda: "key")
    caplog.set_level(logging.INFO, logger="tlserve")
    for expected in (1, 0):
        caplog.clear()
        async with serve(ServeConfig.for_model(SUCC)):
            pass
        told = [record for record in caplog.records if "compiling kernels, once per machine" in record.getMessage()]
        assert len(told) == expected
        (tmp_path / "key").mkdir(exist_ok=True)
        (tmp_path / "key" / "kernel").touch()
