"""The ways to run a server inside a program: how each starts, ends, fails, and what it leaves behind."""

from __future__ import annotations

import json
import signal
import socket
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import h11
import pytest
import trio

from tests.client import DONE, Client, connect, get, post, wait_for_metric
from tests.traces import Traces, settled, wait_until_they_are
from tlserve import ServeConfig, Server, run, serve, spawn
from tlserve.errors import ConfigError, EngineDied, ExitError, ListenError, ModelError, StoppedWhileLoading
from tlserve.loading import Loaded, Progress, load
from tlserve.model.batch import Batch, ForwardOutput
from tlserve.model.runner import BigramRunner

SUCC = Path(__file__).parents[1] / "fixtures" / "succ"  # a byte-level bigram: after byte i comes byte i + 1
CHAT = "/v1/chat/completions"
SLOW = 0.005  # seconds a step: long enough to do something in between


def chat(**fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "a"}]
    return {"model": "succ", "messages": messages, "max_tokens": 3, "temperature": 0} | fields


def succ(**overrides: Any) -> ServeConfig:
    return ServeConfig.for_model(SUCC, **overrides)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


async def start_endless_stream(client: Client) -> None:
    """Start a stream that would go on for longer than any test; its first token has come."""
    reply = await client.start("POST", CHAT, chat(max_tokens=4000, stream=True))
    assert reply.status == 200


async def last_event(client: Client) -> Any:
    return [event async for event in client.events()][-1]


class Gate:
    """Holds up loading until it is opened; ``reached`` says that loading has begun."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self._opened = threading.Event()

    def open(self) -> None:
        self._opened.set()

    def load(self, config: ServeConfig, progress: Progress) -> Loaded:
        self.reached.set()
        while not self._opened.wait(0.01):
            progress("waiting", 0, 1)
        return load(config, progress)

    async def wait_reached(self) -> None:
        assert await trio.to_thread.run_sync(self.reached.wait, 10)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    gate = Gate()
    monkeypatch.setattr("tlserve.server.load", gate.load)
    return gate


@pytest.fixture
def break_model(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Call it, and every step from then on fails."""
    forward = BigramRunner.forward
    is_broken = threading.Event()

    def broken(self: BigramRunner, batch: Batch) -> ForwardOutput:
        if is_broken.is_set():
            raise ZeroDivisionError("secret of the engine")
        return forward(self, batch)

    monkeypatch.setattr(BigramRunner, "forward", broken)
    return is_broken.set


# Starting and ending


async def test_the_block_is_entered_when_the_server_is_ready() -> None:
    async with serve(succ()) as server:
        assert server.http_addr[0] == server.health_addr[0] == "127.0.0.1"
        assert 0 not in (server.http_addr[1], server.health_addr[1])
        assert server.base_url == f"http://127.0.0.1:{server.http_addr[1]}/v1"
        assert (await get(server.health_addr, "/readyz")).json() == {"status": "ready"}
        assert (await post(server.http_addr, CHAT, chat())).status == 200


@pytest.mark.parametrize("ending", ["left", "drained", "raised", "cancelled", "engine died"])
async def test_nothing_is_left_running(
    ending: str, break_model: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tlserve.server.FAREWELL_TIMEOUT", 0.1)
    config = succ(handle_signals=True, step_delay=SLOW, drain_timeout_ms=50)
    async with serve(config) as server:  # what is made once for a process is made now
        await post(server.http_addr, CHAT, chat())
    before = Traces.now()
    with suppress(KeyError, EngineDied), trio.CancelScope() as scope:
        async with serve(config) as server, connect(server.http_addr) as client:
            if ending != "left":
                await start_endless_stream(client)
            if ending == "drained":
                server.drain()
                assert "error" in await last_event(client)
            elif ending == "raised":
                raise KeyError
            elif ending == "cancelled":
                scope.cancel()
            elif ending == "engine died":
                break_model()
                await trio.sleep_forever()
    assert Traces.now() == before


async def test_an_exception_of_the_block_comes_out_as_it_is() -> None:
    alone, inside = KeyError("mine"), ExceptionGroup("mine", [KeyError("of a group of one")])
    for error in (alone, inside):
        with pytest.raises(type(error)) as caught:
            async with serve(succ()):
                raise error
        assert caught.value is error


async def test_leaving_the_block_finishes_what_is_in_flight() -> None:
    async with AsyncExitStack() as stack:
        async with serve(succ(step_delay=SLOW)) as server:
            client = await stack.enter_async_context(connect(server.http_addr))
            await client.start("POST", CHAT, chat(max_tokens=20, stream=True))
        events = [event async for event in client.events()]
    assert events[-1] == DONE
    assert events[-2]["choices"][0]["finish_reason"] == "length"


async def test_cancelling_the_block_aborts_what_is_in_flight() -> None:
    async with AsyncExitStack() as stack:
        with trio.CancelScope() as scope, trio.fail_after(5):
            async with serve(succ(step_delay=SLOW)) as server:
                client = await stack.enter_async_context(connect(server.http_addr))
                await start_endless_stream(client)
                scope.cancel()
                await trio.sleep_forever()
        with pytest.raises((h11.RemoteProtocolError, trio.BrokenResourceError)):  # an end in the middle of a body
            await last_event(client)


async def test_a_path_of_the_other_port_says_so_and_any_other_where_the_routes_are() -> None:
    async with serve(succ()) as server:
        of_api = [(await get(server.http_addr, path)).json() for path in ("/metrics", "/readyz", "/chat/completions")]
        of_health = (await get(server.health_addr, "/v1/models")).json()
    assert [reply["error"]["message"] for reply in (*of_api, of_health)] == [
        "no route for this path; it is on the health port",
        "no route for this path; it is on the health port",
        "no route for this path; the API is under /v1, and GET /openapi.json lists it",
        "no route for this path; the health port has /healthz, /readyz and /metrics",
    ]


@pytest.mark.parametrize(("path", "status"), [("/nowhere", 404), ("/metrics", 405)])
async def test_the_health_port_does_not_ask_for_a_body_that_it_has_no_use_for(path: str, status: int) -> None:
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 5\r\n\r\n"
    async with serve(succ()) as server, connect(server.health_addr) as client:
        await client.stream.send_all(head.encode())
        assert (await client.stream.receive_some()).startswith(b"HTTP/1.1 %d " % status)


async def test_two_servers_of_one_process_know_nothing_of_each_other() -> None:
    async with serve(succ(model_id="one")) as one, serve(succ(model_id="two")) as two:
        for server in (one, two):
            model = server.config.model_id
            assert (await post(server.http_addr, CHAT, chat(model=model))).json()["model"] == model
        one.drain()
        assert [one.phase.value, two.phase.value] == ["draining", "ready"]
        assert (await post(two.http_addr, CHAT, chat(model="two"))).status == 200


def test_run_serves_until_a_signal() -> None:
    before = Traces.now()
    asked: list[str] = []

    def on_ready(server: Server) -> None:
        asked.append(server.base_url)
        signal.raise_signal(signal.SIGTERM)

    run(succ(), on_ready=on_ready)
    assert len(asked) == 1
    assert Traces.now() == before


# A server on a thread


def test_spawn_serves_a_program_without_trio() -> None:
    handlers = Traces.now().handlers
    with spawn(succ()) as server:
        assert server.base_url == f"http://127.0.0.1:{server.http_addr[1]}/v1"
        assert Traces.now().handlers == handlers
        with urllib.request.urlopen(f"{server.base_url}/models") as reply:
            assert json.load(reply)["data"][0]["id"] == "succ"
    assert not any(thread.name == "tlserve" for thread in threading.enumerate())
    server.drain()
    server.join()


def test_join_waits_for_the_drain() -> None:
    server = spawn(succ())
    joining = threading.Thread(target=server.join)
    joining.start()
    assert joining.is_alive()
    server.drain()
    server.drain()
    joining.join(10)
    assert not joining.is_alive()


BAD_STARTS: list[tuple[type[ExitError], dict[str, Any], str]] = [
    (ConfigError, {"max_model_len": 5000}, "max_model_len = 5000"),
    (ModelError, {"model_dir": "/nowhere"}, "/nowhere"),
    (ModelError, {"model_dir": "/nowhere", "http_listen": "127.0.0.1:{used}"}, "/nowhere"),
    (ListenError, {"http_listen": ":{used}", "health_listen": "127.0.0.1:{used}"}, "is the address of http_listen too"),
    (ListenError, {"http_listen": "127.0.0.1:{used}"}, "http_listen = '127.0.0.1:{used}': Address already in use"),
    (ListenError, {"health_listen": "127.0.0.1:{used}"}, "health_listen = '127.0.0.1:{used}': Address already in use"),
]


@pytest.fixture
def used_port() -> Iterator[int]:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        yield sock.getsockname()[1]


@pytest.mark.parametrize(("kind", "values", "text"), BAD_STARTS)
async def test_a_start_that_fails_says_why_in_one_exception(
    kind: type[ExitError], values: dict[str, Any], text: str, used_port: int
) -> None:
    config = _bad_config(values, used_port)
    before = await settled()
    with pytest.raises(kind) as caught:
        async with serve(config):
            pytest.fail("entered")
    assert text.format(used=used_port) in str(caught.value)
    del caught  # its traceback holds what was opened, and so does the thread that loaded, for a moment more
    await wait_until_they_are(before, collect=True)


@pytest.mark.parametrize(("kind", "values", "text"), BAD_STARTS)
def test_spawn_raises_in_the_caller(kind: type[ExitError], values: dict[str, Any], text: str, used_port: int) -> None:
    with pytest.raises(kind) as caught:
        spawn(_bad_config(values, used_port))
    assert text.format(used=used_port) in str(caught.value)
    assert not any(thread.name == "tlserve" for thread in threading.enumerate())


def _bad_config(values: dict[str, Any], used_port: int) -> ServeConfig:
    values = {key: value.format(used=used_port) if isinstance(value, str) else value for key, value in values.items()}
    return ServeConfig.for_model(values.pop("model_dir", SUCC), **values)


# Loading


async def test_while_loading_health_answers_and_the_api_says_why_it_does_not(gate: Gate) -> None:
    api, health = ("127.0.0.1", free_port()), ("127.0.0.1", free_port())
    config = succ(http_listen=f"127.0.0.1:{api[1]}", health_listen=f"127.0.0.1:{health[1]}")

    async def check() -> None:
        await gate.wait_reached()
        assert (await get(health, "/healthz")).status == (await get(api, "/healthz")).status == 200
        assert (await get(health, "/metrics")).status == 200
        ready = await get(health, "/readyz")
        assert (ready.status, ready.json()) == (503, {"status": "loading"})
        for refused in (await post(api, CHAT, chat()), await get(api, "/v1/models")):
            assert (refused.status, refused.headers["retry-after"]) == (503, "1")
            assert refused.json()["error"]["code"] == "model_loading"
        gate.open()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(check)
        async with serve(config):
            assert (await get(health, "/readyz")).status == 200
            assert (await post(api, CHAT, chat())).status == 200


@pytest.mark.parametrize("ending", ["signal", "cancelled"])
async def test_a_start_can_be_given_up_while_loading(gate: Gate, ending: str) -> None:
    """The thread that loads ends as soon as it reports progress."""
    before = Traces.now()
    with trio.fail_after(5):
        async with trio.open_nursery() as nursery:

            async def give_up() -> None:
                await gate.wait_reached()
                if ending == "signal":
                    signal.raise_signal(signal.SIGTERM)
                else:
                    nursery.cancel_scope.cancel()

            nursery.start_soon(give_up)
            with pytest.raises(StoppedWhileLoading if ending == "signal" else trio.Cancelled):
                async with serve(succ(handle_signals=True)):
                    pytest.fail("entered")
        while Traces.now().threads != before.threads:  # noqa: ASYNC110  a thread that ends sets no event
            await trio.sleep(0.01)
    assert Traces.now() == before


# Draining


async def test_drain_is_synchronous_and_can_be_asked_for_again() -> None:
    async with serve(succ(step_delay=SLOW)) as server, connect(server.http_addr) as client:
        await start_endless_stream(client)
        server.drain()
        server.drain()
        assert server.phase.value == "draining"
        assert (await get(server.health_addr, "/readyz")).json() == {"status": "draining"}
        assert (await get(server.health_addr, "/healthz")).status == 200
        server.drain()


async def test_a_drain_closes_idle_connections_and_refuses_on_open_ones() -> None:
    async with (
        serve(succ(step_delay=SLOW)) as server,
        connect(server.http_addr) as idle,
        connect(server.http_addr) as late,
        connect(server.http_addr) as busy,
    ):
        assert (await idle.request("GET", "/v1/models")).status == 200
        await busy.start("POST", CHAT, chat(max_tokens=50, stream=True))
        await late.stream.send_all(b"GET /v1/models HT")
        await get(server.http_addr, "/healthz")  # answered after those bytes were read
        server.drain()
        assert await idle.stream.receive_some() == b""
        await late.stream.send_all(b"TP/1.1\r\nHost: x\r\n\r\n")
        refused = b"".join([chunk async for chunk in late.stream])
        assert refused.startswith(b"HTTP/1.1 503 ")
        assert b'"shutting_down"' in refused
        assert await last_event(busy) == DONE


@pytest.mark.parametrize("stream", [False, True])
async def test_what_has_not_finished_when_the_time_is_over_gets_an_error(stream: bool) -> None:
    async with serve(succ(step_delay=SLOW, drain_timeout_ms=100)) as server, connect(server.http_addr) as client:
        errors: list[Any] = []

        async def follow() -> None:
            if stream:
                await start_endless_stream(client)
                errors.append(await last_event(client))
            else:
                reply = await client.request("POST", CHAT, chat(max_tokens=4000))
                assert reply.status == 503
                errors.append(reply.json())

        async with trio.open_nursery() as nursery:
            nursery.start_soon(follow)
            await wait_for_metric(server.health_addr, "tl_engine_active_sequences", 1)
            server.drain()
        assert errors[0]["error"]["code"] == "shutting_down"
        assert await client.stream.receive_some() == b""


# The engine dies


async def test_a_step_that_fails_is_told_to_everyone_and_ends_the_server(
    break_model: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    with trio.fail_after(10), pytest.raises(EngineDied):  # noqa: PT012  the block is the life of the server
        async with (
            serve(succ(step_delay=SLOW)) as server,
            connect(server.http_addr) as one,
            connect(server.http_addr) as two,
        ):
            await start_endless_stream(one)
            await two.stream.send_all(_post(chat(max_tokens=4000)))
            await wait_for_metric(server.health_addr, "tl_engine_active_sequences", 2)
            break_model()
            assert (await last_event(one))["error"]["code"] == "internal_error"
            whole = b"".join([chunk async for chunk in two.stream])
            assert whole.startswith(b"HTTP/1.1 500 ")
            assert b"secret" not in whole
            for address, path in (
                (server.http_addr, "/healthz"),
                (server.health_addr, "/healthz"),
                (server.health_addr, "/readyz"),
            ):
                reply = await get(address, path)
                assert (reply.status, reply.json()) == (503, {"status": "failed"})
            assert (await post(server.http_addr, CHAT, chat())).status == 500
            await trio.sleep_forever()
    assert "secret of the engine" in caplog.text


async def test_an_engine_that_dies_during_a_drain_is_not_taken_for_a_clean_end(
    break_model: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tlserve.server.FAREWELL_TIMEOUT", 0.1)
    with trio.fail_after(10), pytest.raises(EngineDied):  # noqa: PT012
        async with serve(succ(step_delay=SLOW)) as server, connect(server.http_addr) as client:
            await start_endless_stream(client)
            server.drain()
            break_model()
            assert (await last_event(client))["error"]["code"] == "internal_error"


def test_join_raises_when_the_engine_has_died(break_model: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tlserve.server.FAREWELL_TIMEOUT", 0.1)
    server = spawn(succ())
    break_model()
    with socket.create_connection(server.http_addr) as sock:
        sock.sendall(_post(chat()))
        assert sock.recv(12) == b"HTTP/1.1 500"
    for _ in range(2):
        with pytest.raises(EngineDied):
            server.join()


def _post(body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    return f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data
