"""The official ``openai`` package against a live server: what its users get, and which exception for what."""

from __future__ import annotations

import logging
import ssl
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
import trio
from openai import DefaultHttpxClient, OpenAI

from tests.scrape import metric, wait_for_metric, wait_until_free
from tlserve import ServeConfig, ServerHandle, serve, spawn
from tlserve.errors import EngineDied
from tlserve.model.batch import Batch, ForwardOutput
from tlserve.model.runner import BigramRunner

FIXTURES = Path(__file__).parents[1] / "fixtures"
SUCC = FIXTURES / "succ"  # a byte-level bigram: after byte i comes byte i + 1
PEM = Path(__file__).parent / "http" / "localhost.pem"
MESSAGE: Any = [{"role": "user", "content": "a"}]


def client_of(server: ServerHandle, **options: Any) -> OpenAI:
    defaults: dict[str, Any] = {"base_url": server.base_url, "api_key": "none", "max_retries": 0, "timeout": 30}
    return OpenAI(**defaults | options)


@pytest.fixture(scope="module")
def server() -> Iterator[ServerHandle]:
    with spawn(ServeConfig.for_model(SUCC)) as server:
        yield server


@pytest.fixture
def client(server: ServerHandle) -> Iterator[OpenAI]:
    with client_of(server) as client:
        yield client


# What works


def test_chat(client: OpenAI) -> None:
    completion = client.chat.completions.create(model="succ", messages=MESSAGE, max_tokens=3, temperature=0)
    choice = completion.choices[0]
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "bcd", "length")
    assert completion.usage is not None
    assert (completion.usage.prompt_tokens, completion.usage.completion_tokens) == (1, 3)
    assert completion.usage.prompt_tokens_details is not None
    assert completion.usage.prompt_tokens_details.cached_tokens == 0
    assert completion._request_id


def test_chat_with_log_probabilities(client: OpenAI) -> None:
    completion = client.chat.completions.create(
        model="succ", messages=MESSAGE, max_tokens=2, temperature=0, logprobs=True, top_logprobs=2
    )
    logprobs = completion.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [entry.token for entry in logprobs.content] == ["b", "c"]
    assert all(len(entry.top_logprobs) == 2 for entry in logprobs.content)


def test_a_chat_stream_with_usage(client: OpenAI) -> None:
    stream = client.chat.completions.create(
        model="succ",
        messages=MESSAGE,
        max_completion_tokens=3,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert [chunk.choices[0].delta.content for chunk in chunks if chunk.choices] == ["", "b", "c", "d"]
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == 4


def test_the_stream_helper_accumulates_the_same_message(client: OpenAI) -> None:
    with client.chat.completions.stream(model="succ", messages=MESSAGE, stop="e", temperature=0) as stream:
        assert stream.get_final_completion().choices[0].message.content == "bcd"


def test_completions_of_several_prompts_streamed_or_not(client: OpenAI) -> None:
    prompts = ["a", "f"]
    whole = client.completions.create(model="succ", prompt=prompts, max_tokens=3, temperature=0)
    assert [choice.text for choice in whole.choices] == ["bcd", "ghi"]
    texts = ["", ""]
    for chunk in client.completions.create(model="succ", prompt=prompts, max_tokens=3, temperature=0, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == ["bcd", "ghi"]


def test_embeddings_in_base64_which_is_its_default_and_as_numbers(client: OpenAI) -> None:
    """The client asks for base64 unless it is told otherwise, and decodes what comes."""
    by_default = client.embeddings.create(model="succ", input=["first", "second"])
    as_numbers = client.embeddings.create(model="succ", input=["first", "second"], encoding_format="float")
    assert [item.index for item in by_default.data] == [0, 1]
    assert [item.embedding for item in by_default.data] == [item.embedding for item in as_numbers.data]
    assert len(by_default.data[0].embedding) == 256
    assert sum(x * x for x in by_default.data[0].embedding) == pytest.approx(1.0)


def test_embeddings_of_token_ids_are_those_of_their_text(client: OpenAI) -> None:
    by_text = client.embeddings.create(model="succ", input=["first", "second"])
    by_ids = client.embeddings.create(model="succ", input=[list(b"first"), list(b"second")])
    assert [item.embedding for item in by_ids.data] == [item.embedding for item in by_text.data]


def test_what_clients_send_along_changes_nothing(client: OpenAI) -> None:
    completion = client.chat.completions.create(
        model="succ",
        messages=[{"role": "developer", "content": "x"}, {"role": "user", "content": "a", "name": "somebody"}],
        max_completion_tokens=3,
        temperature=0,
        tools=[],
        tool_choice="none",
        parallel_tool_calls=True,
        response_format={"type": "text"},
        reasoning_effort="low",
        store=False,
        metadata={"key": "value"},
        service_tier="auto",
        prompt_cache_key="key",
        user="somebody",
        extra_headers={"OpenAI-Organization": "org", "OpenAI-Project": "project", "OpenAI-Beta": "none"},
    )
    assert completion.choices[0].message.content == "bcd"


def test_models(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["succ"]
    assert client.models.retrieve("succ").object == "model"


def test_over_tls_with_a_ca_of_its_own() -> None:
    config = ServeConfig.for_model(SUCC, tls_cert=PEM, tls_key=PEM, http_listen="localhost:0")
    with spawn(config) as server:
        url = f"https://localhost:{server.http_addr[1]}/v1"
        with client_of(server, base_url=url, http_client=DefaultHttpxClient(verify=_trust(PEM))) as client:
            stream = client.chat.completions.create(
                model="succ", messages=MESSAGE, max_tokens=3, temperature=0, stream=True
            )
            assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == "bcd"
        with client_of(server, base_url=url) as client, pytest.raises(openai.APIConnectionError):
            client.models.list()


def _trust(path: Path) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(path))


# Errors


def test_each_refusal_is_the_exception_its_users_expect(client: OpenAI) -> None:
    def chat(**fields: Any) -> None:
        client.chat.completions.create(**{"model": "succ", "messages": MESSAGE} | fields)

    cases: list[tuple[dict[str, Any], type[openai.APIStatusError], str | None, str | None]] = [
        ({"temperature": 3}, openai.BadRequestError, "temperature", None),
        ({"messages": []}, openai.BadRequestError, "messages", None),
        ({"max_tokens": 100_000}, openai.BadRequestError, "max_tokens", "context_length_exceeded"),
        ({"model": "nobody"}, openai.NotFoundError, "model", "model_not_found"),
        ({"n": 2}, openai.UnprocessableEntityError, "n", "unsupported_parameter"),
    ]
    for fields, kind, param, code in cases:
        for stream in (False, True):
            with pytest.raises(kind) as caught:
                chat(**fields, stream=stream)
            assert type(caught.value) is kind
            assert (caught.value.code, caught.value.type) == (code, "invalid_request_error")
            assert caught.value.param == param
            assert caught.value.request_id
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nobody")


def test_a_wrong_key_is_an_authentication_error(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("sk-right\n")
    with spawn(ServeConfig.for_model(SUCC, api_keys_file=keys)) as server:
        with client_of(server, api_key="sk-wrong") as client, pytest.raises(openai.AuthenticationError) as caught:
            client.models.list()
        assert caught.value.code == "invalid_api_key"
        with client_of(server, api_key="sk-right") as client:
            assert [model.id for model in client.models.list()] == ["succ"]


@pytest.fixture
def break_model(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Call it, and every step from then on fails."""

    def broken(self: BigramRunner, batch: Batch) -> ForwardOutput:
        raise ZeroDivisionError("the engine broke")

    return lambda: monkeypatch.setattr(BigramRunner, "forward", broken)


def test_a_fault_of_ours_is_an_internal_server_error_and_ends_a_stream(break_model: Callable[[], None]) -> None:
    server = spawn(ServeConfig.for_model(SUCC, step_delay=0.005))
    with client_of(server) as client:
        stream = client.chat.completions.create(model="succ", messages=MESSAGE, max_tokens=4000, stream=True)
        next(stream)
        break_model()
        with pytest.raises(openai.APIError, match="the engine has stopped after a fault"):
            list(stream)
        with pytest.raises(openai.InternalServerError):
            client.chat.completions.create(model="succ", messages=MESSAGE, max_tokens=3)
    with pytest.raises(EngineDied):
        server.join()


def test_a_full_queue_is_a_rate_limit_error_and_a_retry_gets_in_once_there_is_room(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "openai")
    config = ServeConfig.for_model(SUCC, max_num_seqs=1, queue_capacity=1, step_delay=0.005)
    with spawn(config) as server, client_of(server) as client:

        def endless() -> openai.Stream[Any]:
            return client.chat.completions.create(model="succ", messages=MESSAGE, max_tokens=4000, stream=True)

        running = endless()
        next(running)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(endless)
            wait_for_metric(server, "tl_engine_queue_depth", 1)
            with pytest.raises(openai.RateLimitError) as caught:
                client.chat.completions.create(model="succ", messages=MESSAGE, max_tokens=3)
            assert caught.value.response.headers["retry-after"] == "1"
            tries: list[int] = []

            def on_request(request: object) -> None:
                """The first try is refused; before the second, both that are in its way leave."""
                if tries:
                    running.close()
                    waiting.result().close()
                tries.append(1)

            patient = DefaultHttpxClient(event_hooks={"request": [on_request]})
            with client_of(server, max_retries=2, http_client=patient) as retrying:
                completion = retrying.chat.completions.create(
                    model="succ", messages=MESSAGE, max_tokens=3, temperature=0
                )
            assert completion.choices[0].message.content == "bcd"
            assert len(tries) == 2
            assert "Retrying request in 1.000000 seconds" in caplog.text  # what Retry-After says, not its own 0.5


# Leaving


def test_closing_a_stream_in_the_middle_frees_its_blocks() -> None:
    config = ServeConfig.for_model(SUCC, step_delay=0.005, prefix_cache="off")
    with spawn(config) as server, client_of(server) as client:
        stream = client.chat.completions.create(model="succ", messages=MESSAGE, max_tokens=4000, stream=True)
        next(stream)
        assert metric(server, 'tl_engine_kv_blocks{state="used"}') > 0
        stream.close()
        wait_until_free(server)


def test_a_client_that_runs_out_of_patience_frees_its_blocks() -> None:
    config = ServeConfig.for_model(SUCC, step_delay=0.005, prefix_cache="off")
    with spawn(config) as server, client_of(server, timeout=0.2) as client:
        with pytest.raises(openai.APITimeoutError):
            client.chat.completions.create(model="succ", messages=MESSAGE, max_tokens=4000)
        wait_until_free(server)


async def test_cancelling_the_asynchronous_client_in_the_middle_frees_its_blocks() -> None:
    config = ServeConfig.for_model(SUCC, step_delay=0.005, prefix_cache="off")
    async with serve(config) as server, openai.AsyncOpenAI(base_url=server.base_url, api_key="none") as client:
        with trio.CancelScope() as scope:
            async with await client.chat.completions.create(
                model="succ", messages=MESSAGE, max_tokens=4000, stream=True
            ) as stream:
                async for _ in stream:
                    scope.cancel()
        assert scope.cancelled_caught
        await trio.to_thread.run_sync(wait_until_free, server)


# At [DONE] it leaves the generators below its own to the garbage collector, and trio warns of each.
@pytest.mark.filterwarnings("ignore:Async generator:ResourceWarning")
async def test_the_asynchronous_client_works_under_trio(server: ServerHandle) -> None:
    async with openai.AsyncOpenAI(base_url=server.base_url, api_key="none", max_retries=0) as client:
        stream = await client.chat.completions.create(
            model="succ", messages=MESSAGE, max_tokens=3, temperature=0, stream=True
        )
        chunks = [chunk.choices[0].delta.content async for chunk in stream]
        assert chunks == ["", "b", "c", "d"]
        assert [model.id async for model in client.models.list()] == ["succ"]
