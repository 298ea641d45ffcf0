"""What docs/deploy/haproxy.cfg and nginx.conf promise: real proxies before two real servers, on loopback."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import openai
import pytest
import trio

from tests.client import DONE, Address, Client, connect, metric, post, wait_for_metric
from tests.deploy.programs import ROOT, needed
from tests.deploy.proxies import Backend, haproxy, nginx
from tests.soak.server_process import free_addresses
from tlserve import ServeConfig, serve
from tlserve.server import Server

TINY = ROOT / "fixtures" / "tiny-llama"
CHAT = "/v1/chat/completions"
USED = 'tl_engine_kv_blocks{state="used"}'
ASKED = "tl_engine_prefix_cache_asked_tokens_total"
ENDLESS = 1500  # tokens; with a step delay of 20 ms they take half a minute, longer than any wait here
MIB = 1 << 20

Proxy = Callable[[Path, Address, Sequence[Backend]], AbstractAsyncContextManager[None]]
PROXIES: dict[str, Proxy] = {"haproxy": haproxy, "nginx": nginx}


@dataclass
class Site:
    front: Address
    servers: list[Server]

    async def busy(self) -> Server:
        """The server that has a request."""
        with trio.fail_after(15):
            while True:
                for server in self.servers:
                    if await metric(server.health_addr, "tl_engine_active_sequences"):
                        return server

    async def asked(self) -> list[float]:
        """Prompt tokens that each server has looked up in its cache."""
        return [await metric(server.health_addr, ASKED) for server in self.servers]


@pytest.fixture(params=PROXIES)
def proxy(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    needed(name)
    return name


@asynccontextmanager
async def site(proxy: str, **fields: Any) -> AsyncIterator[Site]:
    """Two servers behind a proxy; ``fields`` are the servers'."""
    config = ServeConfig.for_model(TINY, model_id="tiny", threads=1, num_blocks=256, **fields)
    (front,) = free_addresses(1)
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(serve(config)) for _ in range(2)]
        backends = [Backend(server.http_addr, server.health_addr) for server in servers]
        await stack.enter_async_context(PROXIES[proxy](needed(proxy), front, backends))
        yield Site(front, servers)


async def _send_only(client: Client, body: dict[str, Any]) -> None:
    """A request whose answer nobody waits for."""
    data = json.dumps(body).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: test\r\nContent-Length: {len(data)}\r\n\r\n"
    await client.stream.send_all(head.encode() + data)


def chat(content: str, **fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": content}], "ignore_eos": True, **fields}


async def test_an_event_is_passed_on_while_the_next_is_computed_and_leaving_frees_the_blocks(proxy: str) -> None:
    async with site(proxy, step_delay=0.02) as running:
        async with connect(running.front) as client:
            reply = await client.start("POST", CHAT, chat("Hi", stream=True, max_tokens=ENDLESS))
            assert (reply.status, reply.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
            async with aclosing(cast(AsyncGenerator[bytes, None], client.chunks())) as chunks:
                with trio.fail_after(15):
                    assert b'"role":"assistant"' in await anext(chunks)
            health = (await running.busy()).health_addr
        await wait_for_metric(health, USED, 0, within=10)


async def test_a_client_that_leaves_an_answer_that_is_not_streamed_frees_its_blocks(proxy: str) -> None:
    async with site(proxy, step_delay=0.02) as running:
        async with connect(running.front) as client, trio.open_nursery() as nursery:
            nursery.start_soon(client.start, "POST", CHAT, chat("Hi", max_tokens=ENDLESS))
            health = (await running.busy()).health_addr
            nursery.cancel_scope.cancel()
        await wait_for_metric(health, USED, 0, within=10)


async def test_the_turns_of_a_conversation_go_to_the_server_that_has_its_tokens(proxy: str) -> None:
    """The client is OpenAI's, with one header. Every later turn finds the turns before it in the cache."""

    def converse(name: str) -> list[int]:
        cached = []
        messages: Any = []
        with openai.OpenAI(
            base_url=f"http://{running.front[0]}:{running.front[1]}/v1",
            api_key="none",
            max_retries=0,
            default_headers={"X-Conversation-Id": name},
        ) as client:
            for turn in range(3):
                messages.append({"role": "user", "content": f"{name}, turn {turn}: " + "tell me more. " * 4})
                answer = client.chat.completions.create(model="tiny", messages=messages, max_tokens=8, seed=turn)
                messages.append({"role": "assistant", "content": answer.choices[0].message.content})
                assert answer.usage is not None
                assert answer.usage.prompt_tokens_details is not None
                cached.append(answer.usage.prompt_tokens_details.cached_tokens or 0)
        return cached

    async with site(proxy) as running:
        for number in range(8):
            cached = await trio.to_thread.run_sync(converse, f"conversation {number}")
            assert cached[1] > cached[0]
            assert cached[2] > cached[1] + 32, "the turn before this one was computed elsewhere"
        assert all(await running.asked()), "all conversations went to one server"


async def test_requests_without_a_conversation_are_spread(proxy: str) -> None:
    async with site(proxy) as running:
        for _ in range(12):
            assert (await post(running.front, CHAT, chat("Hi", max_tokens=1))).status == 200
        assert all(await running.asked())


async def test_a_server_that_drains_ends_its_stream_and_gets_nothing_new(proxy: str) -> None:
    async with site(proxy, step_delay=0.02) as running, connect(running.front) as client:
        await client.start("POST", CHAT, chat("Hi", stream=True, max_tokens=150))
        draining = await running.busy()
        place = running.servers.index(draining)
        before = (await running.asked())[place]
        draining.drain()
        for number in range(12):
            headers = [("X-Conversation-Id", f"{number}")] if number % 2 else []
            reply = await post(running.front, CHAT, chat("Hi", max_tokens=1), headers)
            assert reply.status == 200, reply.body
        assert (await running.asked())[place] == before
        with trio.fail_after(30):
            events = [event async for event in client.events()]
        assert events[-1] == DONE
        assert events[-2]["choices"][0]["finish_reason"] == "length"


async def test_a_body_that_is_too_large_is_refused_by_the_server_in_its_own_words(proxy: str) -> None:
    async with site(proxy) as running:
        reply = await post(running.front, CHAT, b" " * (4 * MIB + 1000))
    assert (reply.status, reply.json()["error"]["code"]) == (413, "payload_too_large")
    assert "x-request-id" in reply.headers


async def test_a_body_that_nginx_refuses_itself_gets_the_same_kind_of_error() -> None:
    needed("nginx")
    async with site("nginx") as running:
        reply = await post(running.front, CHAT, b" " * (6 * MIB))
    assert (reply.status, reply.json()["error"]["code"]) == (413, "payload_too_large")
    assert "x-request-id" not in reply.headers


async def test_pings_of_a_silent_stream_come_through(proxy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tlserve.openai.stream.PING_INTERVAL", 0.05)
    async with site(proxy, step_delay=0.3) as running, connect(running.front) as client:
        await client.start("POST", CHAT, chat("Hi", stream=True, max_tokens=3))
        with trio.fail_after(10):
            received = b"".join([chunk async for chunk in client.chunks()])
    assert b"\n\n: ping\n\n" in received or received.startswith(b": ping\n\n")
    assert received.endswith(b"data: [DONE]\n\n")


async def test_a_refusal_for_load_reaches_the_client_as_it_is(proxy: str) -> None:
    """429 is the client's to wait for: a proxy that asked every other server would only spread the crowd."""
    async with site(proxy, step_delay=0.02, max_num_seqs=1, queue_capacity=1) as running, AsyncExitStack() as stack:
        for server in running.servers:
            for _ in range(2):  # one runs and one waits
                client = await stack.enter_async_context(connect(server.http_addr))
                await _send_only(client, chat("Hi", max_tokens=ENDLESS))
            await wait_for_metric(server.health_addr, "tl_engine_queue_depth", 1, within=10)
        reply = await post(running.front, CHAT, chat("Hi", max_tokens=1))
    assert (reply.status, reply.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert reply.headers["retry-after"] == "1"


async def test_a_site_without_servers_answers_in_the_form_of_the_api(proxy: str) -> None:
    front, *closed = free_addresses(3)
    async with PROXIES[proxy](needed(proxy), front, [Backend(closed[0], closed[1])] * 2):
        reply = await post(front, CHAT, chat("Hi"))
    assert (reply.status, reply.json()["error"]["code"]) == (503, "no_capacity")
    assert reply.headers["retry-after"] == "1"
