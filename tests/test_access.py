"""Who may use a server: API keys, pages of browsers, TLS; over real sockets."""

from __future__ import annotations

import os
import signal
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.client import Address, Client, connect, get, metric, post, wait_for_metric
from tlserve import ServeConfig, Server, serve
from tlserve.errors import ConfigError

SUCC = Path(__file__).parents[1] / "fixtures" / "succ"
PEM = Path(__file__).parent / "http" / "localhost.pem"  # a certificate and its key
# The key of that file under a password.
ENCRYPTED_KEY = """\
-----BEGIN ENCRYPTED PRIVATE KEY-----
MIHsMFcGCSqGSIb3DQEFDTBKMCkGCSqGSIb3DQEFDDAcBAhCex9BALjmRQICCAAw
DAYIKoZIhvcNAgkFADAdBglghkgBZQMEAQIEEMoMPQ/SakLL14sBEPW9+UMEgZAb
jd3eegsUdUW+eA/BfjkY03+a9VCMRtskZFvwoDb7u9NQ1F0sxJEEGMzqedpDUzGT
o+eUOTdWRuhkzPq5TkOuB5x0cgxn2rO0NjgspiHtIq8vjEhR3AxV08BCAKbMqm39
HlSiBBYyRuAuIu2gXKTqu93CX1TxqI+ePMLMd5G8SCEOxHVhjzwnou4gdQyX+nU=
-----END ENCRYPTED PRIVATE KEY-----
"""
CHAT = "/v1/chat/completions"
PAGE = "https://app.example"
KEY = ("Authorization", "Bearer sk-one")
ORIGIN = ("Origin", PAGE)


def chat(**fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "a"}]
    return {"model": "succ", "messages": messages, "max_tokens": 3, "temperature": 0} | fields


@pytest.fixture
def keys_file(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text("sk-one\n")
    return path


@pytest.fixture
async def locked(keys_file: Path) -> AsyncIterator[Server]:
    config = ServeConfig.for_model(SUCC, api_keys_file=keys_file, cors_allow_origins=[PAGE])
    async with serve(config) as server:
        yield server


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", CHAT), ("POST", "/v1/completions"), ("POST", "/v1/embeddings"), ("POST", "/v1/tokenize"),
        ("POST", "/v1/detokenize"), ("GET", "/v1/models"), ("HEAD", "/v1/models"), ("GET", "/v1/models/succ"),
        ("GET", "/v1/nowhere"), ("GET", "/v1"), ("GET", "/v1/"), ("DELETE", "/v1/models"), ("OPTIONS", CHAT),
        ("GET", "/%76%31/models"), ("GET", "/v1%2Fmodels"), ("GET", "http://test/v1/models"),
    ],
)  # fmt: skip
async def test_nothing_under_v1_answers_without_a_key(locked: Server, method: str, path: str) -> None:
    async with connect(locked.http_addr) as client:
        for headers in ([], [("Authorization", "Bearer sk-two")]):
            reply = await client.request(method, path, b"{not json" if method == "POST" else None, headers)
            assert (reply.status, reply.headers["www-authenticate"]) == (401, "Bearer")
            if method != "HEAD":
                error = reply.json()["error"]
                assert (error["type"], error["param"], error["code"]) == (
                    "authentication_error",
                    None,
                    "invalid_api_key",
                )
                assert "sk-" not in error["message"]


async def test_a_key_opens_every_route_and_health_needs_none(locked: Server) -> None:
    assert (await post(locked.http_addr, CHAT, chat(), [KEY])).status == 200
    assert (await get(locked.http_addr, "/v1/models", [KEY])).status == 200
    assert (await get(locked.http_addr, "/v1/nowhere", [KEY])).status == 404
    assert (await get(locked.http_addr, "/nowhere")).status == 404
    for address, path in (
        (locked.http_addr, "/healthz"),
        (locked.http_addr, "/health"),
        (locked.health_addr, "/healthz"),
        (locked.health_addr, "/readyz"),
        (locked.health_addr, "/metrics"),
    ):
        assert (await get(address, path)).status == 200


async def test_a_refused_body_is_not_asked_for(locked: Server) -> None:
    async with connect(locked.http_addr) as client:
        await client.stream.send_all(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 100\r\n\r\n"
        )
        assert (await client.stream.receive_some()).startswith(b"HTTP/1.1 401 ")


async def test_a_preflight_comes_before_the_key_and_every_answer_is_readable(locked: Server) -> None:
    question = [ORIGIN, ("Access-Control-Request-Method", "POST"), ("Access-Control-Request-Headers", "authorization")]
    async with connect(locked.http_addr) as client:
        answer = await client.request("OPTIONS", CHAT, headers=question)
        assert (answer.status, answer.body) == (204, b"")
        assert answer.headers["access-control-allow-headers"] == "*, Authorization"
        replies = [
            answer,
            await client.request("POST", CHAT, chat(), [ORIGIN]),
            await client.request("POST", CHAT, chat(temperature=9), [ORIGIN, KEY]),
            await client.request("POST", CHAT, chat(), [ORIGIN, KEY]),
            await client.request("POST", CHAT, chat(stream=True), [ORIGIN, KEY]),
        ]
    assert [reply.status for reply in replies] == [204, 401, 400, 200, 200]
    for reply in replies:
        assert (reply.headers["access-control-allow-origin"], reply.headers["vary"]) == (PAGE, "Origin")
        assert "X-Request-Id" in reply.headers["access-control-expose-headers"]
    other = await get(locked.http_addr, "/v1/models", [("Origin", "https://other.example"), KEY])
    assert (other.status, other.headers.get("access-control-allow-origin")) == (200, None)


async def test_sighup_reads_the_keys_again_and_keeps_them_when_the_file_is_broken(
    keys_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "tlserve")
    config = ServeConfig.for_model(SUCC, api_keys_file=keys_file, handle_signals=True)

    async def status_of(key: str) -> int:
        return (await get(server.http_addr, "/v1/models", [("Authorization", f"Bearer {key}")])).status

    async def logged(text: str) -> None:
        with trio.fail_after(5):
            while text not in caplog.text:  # noqa: ASYNC110  a signal sets no event of ours
                await trio.sleep(0.005)

    async with serve(config) as server:
        await trio.Path(keys_file).write_text("sk-two\n")
        signal.raise_signal(signal.SIGHUP)
        await logged("the API keys have been read again")
        assert [await status_of("sk-one"), await status_of("sk-two")] == [401, 200]
        await trio.Path(keys_file).write_text("sk three\n")
        signal.raise_signal(signal.SIGHUP)
        await logged("the API keys stay as they were")
        assert [await status_of("sk"), await status_of("sk-two")] == [401, 200]
    assert not any("sk" in str(vars(record)) for record in caplog.records)
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL


@pytest.mark.parametrize(
    ("key", "value"),
    [("api_keys_file", "/nowhere"), ("cors_allow_origins", ["app.example"])],
)
async def test_a_bad_value_is_a_config_error_at_start(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"^{key} = "):
        async with serve(ServeConfig.for_model(SUCC, **{key: value})):
            pytest.fail("entered")


@asynccontextmanager
async def connect_tls(address: Address) -> AsyncIterator[Client]:
    context = ssl.create_default_context(cafile=str(PEM))
    stream = await trio.open_tcp_stream(*address)
    secure: Any = trio.SSLStream(stream, context, server_hostname="localhost", https_compatible=True)
    try:
        yield Client(secure)
    finally:
        await trio.aclose_forcefully(secure)


def tls_config(**overrides: Any) -> ServeConfig:
    return ServeConfig.for_model(SUCC, tls_cert=PEM, tls_key=PEM, **overrides)


async def test_tls_covers_the_api_and_not_the_health_port() -> None:
    async with serve(tls_config()) as server:
        assert server.base_url.startswith("https://127.0.0.1:")
        async with connect_tls(server.http_addr) as client:
            assert (await client.request("POST", CHAT, chat())).status == 200
            reply = await client.start("POST", CHAT, chat(stream=True))
            assert reply.status == 200
            assert len([event async for event in client.events()]) == 5
        assert (await get(server.health_addr, "/readyz")).status == 200


async def test_tls_before_1_2_is_refused() -> None:
    context = ssl.create_default_context(cafile=str(PEM))
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_2
    async with serve(tls_config()) as server:
        stream = trio.SSLStream(await trio.open_tcp_stream(*server.http_addr), context, server_hostname="localhost")
        await stream.do_handshake()
        assert stream.version() == "TLSv1.2"
        await trio.aclose_forcefully(stream)
        with pytest.warns(DeprecationWarning, match="TLSv1_1"):
            context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_1
        context.set_ciphers("DEFAULT:@SECLEVEL=0")
        stream = trio.SSLStream(await trio.open_tcp_stream(*server.http_addr), context, server_hostname="localhost")
        with pytest.raises(trio.BrokenResourceError):
            await stream.do_handshake()
        await trio.aclose_forcefully(stream)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_tls_client_that_leaves_frees_its_blocks(stream: bool) -> None:
    async with serve(tls_config(step_delay=0.005, prefix_cache="off")) as server:
        async with connect_tls(server.http_addr) as client, trio.open_nursery() as nursery:
            nursery.start_soon(client.start, "POST", CHAT, chat(max_tokens=4000, stream=stream))
            await wait_for_metric(server.health_addr, "tl_engine_active_sequences", 1)
            nursery.cancel_scope.cancel()
        await wait_for_metric(server.health_addr, 'tl_engine_kv_blocks{state="used"}', 0)
        assert await metric(server.health_addr, "tl_engine_active_sequences") == 0


async def test_a_drain_finishes_what_is_in_flight_over_tls() -> None:
    async with serve(tls_config(step_delay=0.005)) as server, connect_tls(server.http_addr) as client:
        await client.start("POST", CHAT, chat(max_tokens=30, stream=True))
        server.drain()
        events = [event async for event in client.events()]
        assert events[-1] == "[DONE]"
        assert await client.stream.receive_some() == b""


@pytest.mark.parametrize("broken", ["tls_cert", "tls_key"])
async def test_bad_pem_is_a_config_error_naming_the_key(tmp_path: Path, broken: str) -> None:
    files = {"tls_cert": PEM, "tls_key": PEM}
    for content in (None, "", "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n", ENCRYPTED_KEY):
        path = tmp_path / f"{broken}.pem"
        if content is not None:
            path.write_text(content)
        with pytest.raises(ConfigError, match=f"{broken} = '{path}'"):
            async with serve(ServeConfig.for_model(SUCC, **files | {broken: path})):
                pytest.fail("entered")


@pytest.mark.parametrize("key", ["tls_cert", "tls_key"])
async def test_a_pipe_or_a_device_is_no_pem_file(tmp_path: Path, key: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    files = {"tls_cert": PEM, "tls_key": PEM}
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(ConfigError, match=f"^{key} = '{path}': must be a regular file$"):
            async with serve(ServeConfig.for_model(SUCC, **files | {key: path})):
                pytest.fail("entered")


async def test_keys_cors_and_tls_hold_together(keys_file: Path) -> None:
    config = tls_config(api_keys_file=keys_file, cors_allow_origins=["*"])
    async with serve(config) as server, connect_tls(server.http_addr) as client:
        refused = await client.request("GET", "/v1/models")
        assert (refused.status, refused.headers["access-control-allow-origin"]) == (401, "*")
        assert (await client.request("GET", "/v1/models", headers=[KEY])).status == 200
