"""LangChain's ChatOpenAI and OpenAIEmbeddings."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import islice

import openai
import pytest
from langchain_core.exceptions import ContextOverflowError
from langchain_openai import ChatOpenAI, OpenAIEmbeddings

from tests.clients.conftest import Full
from tests.examples import CAPITAL, COLOURS, MODEL, STORY, ask, cost, run_python, text_and_cost, text_of
from tests.scrape import metric, wait_until_free
from tlserve import ServerHandle


def test_chat_example(server: ServerHandle) -> None:
    printed = run_python("langchain_chat.py", server)
    assert printed == f"{text_of(ask(server, CAPITAL))}\n{cost(ask(server, COLOURS))}"


def test_stream_example(server: ServerHandle) -> None:
    assert run_python("langchain_stream.py", server) == text_and_cost(ask(server, COLOURS))


def test_embeddings_example(server: ServerHandle) -> None:
    similarities = [float(line.split()[0]) for line in run_python("langchain_embeddings.py", server).splitlines()]
    assert len(similarities) == 3
    assert similarities == sorted(similarities, reverse=True)


def test_embeddings_are_those_of_the_openai_client(told: ServerHandle) -> None:
    with openai.OpenAI() as client:
        expected = [item.embedding for item in client.embeddings.create(model=MODEL, input=["one", "two"]).data]
    embeddings = OpenAIEmbeddings(model=MODEL, check_embedding_ctx_length=False)
    assert embeddings.embed_documents(["one", "two"]) == expected
    assert embeddings.embed_query("two") == expected[1]


async def _streamed(model: ChatOpenAI, question: str) -> str:
    return "".join([chunk.text async for chunk in model.astream(question)])


def test_whole_streamed_and_asynchronous_answers_are_one(told: ServerHandle) -> None:
    model = ChatOpenAI(model=MODEL, max_tokens=32, temperature=1, seed=7)
    question = COLOURS[0]["content"]
    expected = text_of(ask(told, COLOURS, temperature=1, seed=7))
    assert model.invoke(question).text == expected
    assert "".join(chunk.text for chunk in model.stream(question)) == expected
    assert asyncio.run(_streamed(model, question)) == expected


def test_a_bad_value_is_a_bad_request(told: ServerHandle) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature must be a number from 0 to 2, got 3") as caught:
        ChatOpenAI(model=MODEL, temperature=3).invoke("Hi")
    assert caught.value.param == "temperature"


def test_a_prompt_that_is_too_long_is_a_context_overflow(told: ServerHandle) -> None:
    with pytest.raises(ContextOverflowError):
        ChatOpenAI(model=MODEL).invoke("Hi " * 1000)


def test_what_the_server_does_not_serve_is_refused_by_name(told: ServerHandle) -> None:
    with pytest.raises(openai.NotFoundError, match="no route for this path"):
        ChatOpenAI(model=MODEL, use_responses_api=True).invoke("Hi")
    for method in ("json_mode", "json_schema", "function_calling"):
        schema = {"title": "Colour", "type": "object", "properties": {"name": {"type": "string"}}}
        with pytest.raises(openai.UnprocessableEntityError, match="not supported"):
            ChatOpenAI(model=MODEL).with_structured_output(schema, method=method).invoke("Name a colour as JSON.")


def test_a_stream_has_its_usage_only_when_it_is_asked_for(told: ServerHandle) -> None:
    for asked in (True, None):
        chunks = list(ChatOpenAI(model=MODEL, max_tokens=3, stream_usage=asked).stream("Hi"))
        assert any(chunk.usage_metadata is not None for chunk in chunks) == (asked is True)


def test_a_full_server_is_a_rate_limit_error_without_retries(told_full: Full) -> None:
    with pytest.raises(openai.RateLimitError):
        ChatOpenAI(model=MODEL, max_retries=0).invoke("Hi")


def test_a_retry_waits_as_long_as_the_server_says(
    refused_once: Callable[[Callable[[], str]], str], server: ServerHandle, caplog: pytest.LogCaptureFixture
) -> None:
    model = ChatOpenAI(model=MODEL, max_tokens=3, temperature=0)
    assert refused_once(lambda: model.invoke(COLOURS).text) == text_of(ask(server, COLOURS, max_tokens=3))
    assert "Retrying request in 1.000000 seconds" in caplog.text


def test_leaving_a_stream_frees_its_blocks(told_slow: ServerHandle) -> None:
    stream = ChatOpenAI(model=MODEL, temperature=0).stream(STORY)
    assert len(list(islice(stream, 3))) == 3
    assert metric(told_slow, 'tl_engine_kv_blocks{state="used"}') > 0
    stream.close()
    wait_until_free(told_slow)
