"""Specs to engine requests: what needs the model's vocabulary and context."""

from __future__ import annotations

import json

import pytest

from tests.openai.fakes import EOS, MAX_MODEL_LEN, Api
from tlserve.engine.request import GenRequest
from tlserve.errors import ContextLengthExceeded, InvalidRequest
from tlserve.openai.parse import parse_chat, parse_completion
from tlserve.openai.prepare import chat_requests, completion_requests


def complete(prompt: object = "a", *, api: Api | None = None, priority: int = 0, **fields: object) -> list[GenRequest]:
    spec = parse_completion(json.dumps({"model": "succ", "prompt": prompt, **fields}).encode())
    return completion_requests((api or Api()).service, spec, priority=priority)


def chat(*contents: str, api: Api | None = None, **fields: object) -> GenRequest:
    messages = [{"role": "user", "content": content} for content in contents]
    spec = parse_chat(json.dumps({"model": "succ", "messages": messages, **fields}).encode())
    return chat_requests((api or Api()).service, spec, priority=0)[0]


def test_a_chat_without_max_tokens_may_fill_the_context() -> None:
    request = chat("ab", "c")
    assert request.prompt == tuple(b"abc")
    assert request.max_tokens == MAX_MODEL_LEN - 3


def test_prompt_and_max_tokens_may_fill_the_context_and_no_more() -> None:
    assert complete("a" * 60, max_tokens=4)[0].max_tokens == 4
    with pytest.raises(ContextLengthExceeded, match=r"60 tokens.*max_tokens is 5.*64 tokens") as caught:
        complete("a" * 60, max_tokens=5)
    assert caught.value.param == "max_tokens"
    with pytest.raises(ContextLengthExceeded, match=rf"max_completion_tokens is {10**30};.*64 tokens") as caught:
        chat("a", max_completion_tokens=10**30)
    assert caught.value.param == "max_completion_tokens"


def test_the_default_of_completions_gives_way_to_the_context() -> None:
    assert complete("a" * 40)[0].max_tokens == 16
    assert complete("a" * 60)[0].max_tokens == 4


def test_a_prompt_that_leaves_no_room_is_refused_whatever_max_tokens() -> None:
    for num_tokens in (MAX_MODEL_LEN, MAX_MODEL_LEN + 1, 10 * MAX_MODEL_LEN, 500_000):
        with pytest.raises(ContextLengthExceeded, match="64 tokens") as caught:
            complete("a" * num_tokens, max_tokens=1)
        assert caught.value.param == "prompt"
        with pytest.raises(ContextLengthExceeded) as caught:
            chat("a" * num_tokens)
        assert caught.value.param == "messages"
        with pytest.raises(ContextLengthExceeded) as caught:
            complete(["a", [97] * num_tokens])
        assert caught.value.param == "prompt[1]"


@pytest.mark.parametrize(
    ("prompt", "param"),
    [([256], "prompt"), ([-1], "prompt"), ([10**30], "prompt"), (["a", [1, 256]], "prompt[1]")],
)
def test_prompt_ids_outside_the_vocabulary_are_refused(prompt: object, param: str) -> None:
    with pytest.raises(InvalidRequest, match="token ids from 0 to 255") as caught:
        complete(prompt)
    assert caught.value.param == param


def test_parameters_that_name_a_token_outside_the_vocabulary_are_refused() -> None:
    for id in ("256", "999999", "999999999999999999"):
        with pytest.raises(InvalidRequest, match="token ids from 0 to 255") as caught:
            complete(logit_bias={id: 5})
        assert caught.value.param == "logit_bias"
    with pytest.raises(InvalidRequest, match="token ids from 0 to 255") as caught:
        complete(stop_token_ids=[3, 256])
    assert caught.value.param == "stop_token_ids"


def test_a_bias_on_every_token_is_taken() -> None:
    request = complete(logit_bias={str(id): -100 for id in range(256)})[0]
    assert len(request.params.logit_bias) == 256


@pytest.mark.parametrize(("top_k", "used"), [(1, 1), (256, 256), (257, 256), (2**31, 256), (2**63, 256), (-1, 0)])
def test_top_k_past_the_vocabulary_takes_all_of_it(top_k: int, used: int) -> None:
    assert complete(top_k=top_k)[0].params.top_k == used


def test_a_template_that_renders_nothing_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="empty prompt"):
        chat("")


def test_a_template_that_refuses_the_messages_is_the_clients_error() -> None:
    api = Api(template="{{ raise_exception('roles must alternate') }}")
    with pytest.raises(InvalidRequest, match="roles must alternate") as caught:
        chat("a", api=api)
    assert caught.value.param == "messages"


def test_stop_ids_are_the_models_and_the_requests() -> None:
    assert complete()[0].stop_ids == {EOS}
    assert complete(stop_token_ids=[3])[0].stop_ids == {3, EOS}
    assert complete(stop_token_ids=[3], ignore_eos=True)[0].stop_ids == {3}
    assert complete(ignore_eos=True)[0].stop_ids == frozenset()


def test_min_tokens_must_fit_what_is_left() -> None:
    assert chat("a", min_tokens=63).min_tokens == 63
    with pytest.raises(InvalidRequest) as caught:
        chat("a", min_tokens=64)
    assert caught.value.param == "min_tokens"


def test_a_seed_is_kept_and_absent_ones_differ() -> None:
    assert complete(seed=-7)[0].seed == -7
    seeds = {complete()[0].seed for _ in range(8)}
    assert len(seeds) == 8
    assert all(-(2**63) <= seed < 2**63 for seed in seeds)
    assert complete(api=Api(default_seed=5))[0].seed == 5
    assert complete(api=Api(default_seed=5), seed=6)[0].seed == 6


def test_each_prompt_of_a_list_is_what_it_would_be_alone() -> None:
    def ask(prompt: object) -> list[GenRequest]:
        return complete(prompt, priority=4, seed=3, temperature=0.5, stop_token_ids=[9])

    together = ask(["a", [98, 99], "c"])
    assert together == [ask(prompt)[0] for prompt in ("a", [98, 99], "c")]
    assert together[0].priority == 4


def test_prompts_of_a_list_without_a_seed_draw_apart() -> None:
    assert len({request.seed for request in complete(["a"] * 8)}) == 8
