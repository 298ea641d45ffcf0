"""LiteLLM, told by its prefix that the server speaks OpenAI's protocol."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Any

import litellm
import openai
import pytest

from tests.clients.conftest import Full
from tests.examples import CAPITAL, COLOURS, MODEL, STORY, ask, run_python, text_and_cost, text_of
from tests.scrape import metric, wait_until_free
from tlserve import ServerHandle


def complete(messages: Any = COLOURS, **fields: Any) -> Any:
    return litellm.completion(**{"model": f"openai/{MODEL}", "messages": messages, "temperature": 0} | fields)


def test_chat_example(server: ServerHandle) -> None:
    assert run_python("litellm_chat.py", server) == text_and_cost(ask(server, CAPITAL))


def test_stream_example(server: ServerHandle) -> None:
    assert run_python("litellm_stream.py", server) == text_and_cost(ask(server, COLOURS))


def test_embeddings_example(server: ServerHandle) -> None:
    assert run_python("litellm_embeddings.py", server).startswith("64 dimensions, cosine ")


def test_whole_and_streamed_answers_are_one(told: ServerHandle) -> None:
    seeded = {"max_tokens": 32, "temperature": 1, "seed": 7}
    expected = text_of(ask(told, COLOURS, **seeded))
    assert complete(**seeded).choices[0].message.content == expected
    chunks = complete(**seeded, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected


def test_embeddings_are_those_of_the_openai_client(told: ServerHandle) -> None:
    with openai.OpenAI() as client:
        expected = client.embeddings.create(model=MODEL, input="one").data[0].embedding
    reply = litellm.embedding(model=f"openai/{MODEL}", input=["one"])
    assert reply.data[0]["embedding"] == expected
    assert reply.usage.prompt_tokens == 3


def test_a_bad_value_is_a_bad_request(told: ServerHandle) -> None:
    with pytest.raises(litellm.BadRequestError, match="temperature must be a number from 0 to 2, got 3"):
        complete(temperature=3)


def test_a_request_past_the_context_is_a_context_window_error(told: ServerHandle) -> None:
    for messages, max_tokens in ((COLOURS, 100_000), ([{"role": "user", "content": "Hi " * 1000}], 1)):
        with pytest.raises(litellm.ContextWindowExceededError):
            complete(messages, max_tokens=max_tokens)


def test_a_full_server_is_a_rate_limit_error_without_retries(told_full: Full) -> None:
    with pytest.raises(litellm.RateLimitError):
        complete(max_retries=0)


def test_a_retry_waits_as_long_as_the_server_says(
    refused_once: Callable[[Callable[[], str]], str], server: ServerHandle, caplog: pytest.LogCaptureFixture
) -> None:
    def client() -> str:
        text: str = complete(max_tokens=3).choices[0].message.content
        return text

    assert refused_once(client) == text_of(ask(server, COLOURS, max_tokens=3))
    assert "Retrying request in 1.000000 seconds" in caplog.text


def test_leaving_a_stream_frees_its_blocks(told_slow: ServerHandle) -> None:
    with complete(STORY, stream=True) as stream:
        assert len(list(islice(stream, 3))) == 3
        assert metric(told_slow, 'tl_engine_kv_blocks{state="used"}') > 0
    wait_until_free(told_slow)
