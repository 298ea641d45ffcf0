"""pydantic-ai's chat models and embedders."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import openai
import pytest
from pydantic_ai import Agent, Embedder, ModelSettings
from pydantic_ai.exceptions import (
    ModelContextWindowExceededError,
    ModelNotFoundError,
    ModelRateLimitError,
    ModelRequestRejectedError,
)

from tests.clients.conftest import Full
from tests.examples import CAPITAL, COLOURS, MODEL, STORY, ask, run_python, text_and_cost, text_of
from tests.scrape import metric, wait_until_free
from tlserve import ServerHandle

QUESTION = COLOURS[0]["content"]


def agent(**settings: object) -> Agent:
    return Agent(f"openai-chat:{MODEL}", model_settings=ModelSettings(**{"temperature": 0, **settings}))


def test_chat_example(server: ServerHandle) -> None:
    assert run_python("pydantic_ai_chat.py", server) == text_and_cost(ask(server, CAPITAL))


def test_stream_example(server: ServerHandle) -> None:
    assert run_python("pydantic_ai_stream.py", server) == text_and_cost(ask(server, COLOURS))


def test_embeddings_example(server: ServerHandle) -> None:
    assert run_python("pydantic_ai_embeddings.py", server) == "64 dimensions, 15 tokens\n"


def test_embeddings_are_those_of_the_openai_client(told: ServerHandle) -> None:
    with openai.OpenAI() as client:
        expected = [item.embedding for item in client.embeddings.create(model=MODEL, input=["one", "two"]).data]
    assert Embedder(f"openai:{MODEL}").embed_documents_sync(["one", "two"]).embeddings == expected


def test_a_conversation_goes_on_from_its_history(told: ServerHandle) -> None:
    """The second turn sends the first answer back, and the server finds all before it in its prefix cache."""
    first = agent(max_tokens=8).run_sync(QUESTION)
    second = agent(max_tokens=8).run_sync("And three more?", message_history=first.all_messages())
    messages = [
        *COLOURS,
        {"role": "assistant", "content": first.output},
        {"role": "user", "content": "And three more?"},
    ]
    assert second.output == text_of(ask(told, messages, max_tokens=8))
    assert second.usage.cache_read_tokens >= 32


def test_a_bad_value_is_a_rejected_request(told: ServerHandle) -> None:
    with pytest.raises(ModelRequestRejectedError, match="temperature must be a number from 0 to 2, got 3"):
        agent(temperature=3).run_sync(QUESTION)


def test_a_request_past_the_context_is_a_context_window_error(told: ServerHandle) -> None:
    for max_tokens, question in ((100_000, QUESTION), (1, "Hi " * 1000)):
        with pytest.raises(ModelContextWindowExceededError):
            agent(max_tokens=max_tokens).run_sync(question)


def test_what_the_server_does_not_serve_is_refused_by_name(told: ServerHandle) -> None:
    with pytest.raises(ModelNotFoundError, match="route_not_found"):
        Agent(f"openai:{MODEL}").run_sync(QUESTION)
    with pytest.raises(ModelRequestRejectedError, match=r"messages\[0\].content as a list of parts is not supported"):
        agent().run_sync(["one", "two"])
    with pytest.raises(ModelRequestRejectedError, match="tools are not supported"):
        Agent(f"openai-chat:{MODEL}", output_type=int).run_sync(QUESTION)


def test_a_full_server_is_a_rate_limit_error_without_retries(told_full: Full) -> None:
    with pytest.raises(ModelRateLimitError):
        agent(max_retries=0).run_sync(QUESTION)


def test_a_retry_waits_as_long_as_the_server_says(
    refused_once: Callable[[Callable[[], str]], str], server: ServerHandle, caplog: pytest.LogCaptureFixture
) -> None:
    def client() -> str:
        return str(agent(max_tokens=3).run_sync(QUESTION).output)

    assert refused_once(client) == text_of(ask(server, COLOURS, max_tokens=3))
    assert "Retrying request in 1.000000 seconds" in caplog.text


async def _read_a_little(result: Any, server: ServerHandle) -> None:
    async for _ in result.stream_text(delta=True, debounce_by=None):
        break
    assert await asyncio.to_thread(metric, server, 'tl_engine_kv_blocks{state="used"}') > 0


def test_cancelling_a_stream_frees_its_blocks(told_slow: ServerHandle) -> None:
    async def cancel() -> None:
        async with agent().run_stream(STORY[0]["content"]) as result:
            await _read_a_little(result, told_slow)
            await result.cancel()
            await asyncio.to_thread(wait_until_free, told_slow)

    asyncio.run(cancel())


def test_leaving_the_block_of_a_stream_frees_its_blocks(told_slow: ServerHandle) -> None:
    async def leave() -> None:
        async with agent().run_stream(STORY[0]["content"]) as result:
            await _read_a_little(result, told_slow)
        await asyncio.to_thread(wait_until_free, told_slow)

    asyncio.run(leave())
