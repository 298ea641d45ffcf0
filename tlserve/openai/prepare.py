"""Specs to engine requests: the checks that need the model's vocabulary and context."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

from tlserve.engine.request import GenRequest, SamplingParams
from tlserve.errors import ContextLengthExceeded, InvalidRequest
from tlserve.openai.body import shown
from tlserve.openai.parse import ChatSpec, CompletionSpec, GenSpec, TokensOrText
from tlserve.openai.requests import INT64_MAX, INT64_MIN
from tlserve.openai.service import Service
from tlserve.text.template import TemplateRenderError


def chat_requests(service: Service, spec: ChatSpec, *, priority: int) -> list[GenRequest]:
    """Render, encode and check a chat. Raises InvalidRequest, ContextLengthExceeded."""
    check_params(service, spec.gen)
    prompt = encode_chat(service, spec.messages, limit=service.max_model_len)
    if not prompt:
        raise InvalidRequest("messages must not render to an empty prompt", param="messages")
    return [_request(service, spec.gen, prompt, "messages", priority)]


def completion_requests(service: Service, spec: CompletionSpec, *, priority: int) -> list[GenRequest]:
    """Encode and check the prompts, one request each. Raises InvalidRequest, ContextLengthExceeded."""
    check_params(service, spec.gen)
    requests = []
    for index, given in enumerate(spec.prompts):
        param = f"prompt[{index}]" if spec.is_list else "prompt"
        prompt = encode(service, given, param, parse_special=True)
        requests.append(_request(service, spec.gen, prompt, param, priority))
    return requests


def encode_chat(service: Service, messages: Sequence[Mapping[str, object]], *, limit: int | None) -> list[int]:
    """Token ids of the rendered messages. Raises InvalidRequest, ContextLengthExceeded (surely above ``limit``)."""
    try:
        with _naming("messages"):
            return service.chat_encoder.encode(messages, limit=limit)
    except TemplateRenderError as error:
        raise InvalidRequest(
            f"messages cannot be rendered by the model's template: {error}", param="messages"
        ) from None


def encode(service: Service, given: TokensOrText, param: str, *, parse_special: bool) -> list[int]:
    """Token ids of a prompt given as text or as ids. Raises InvalidRequest, ContextLengthExceeded.

    Text gets what the tokenizer puts around every text (BOS); ids are taken as they are.
    """
    if isinstance(given, str):
        with _naming(param):
            prompt = service.tokenizer.encode(
                given, add_special_tokens=True, parse_special=parse_special, limit=service.max_model_len
            )
    else:
        check_ids(service, given, param)
        prompt = given
    if not prompt:
        raise InvalidRequest(f"{param} must not be empty, it has no tokens", param=param)
    return prompt


def check_ids(service: Service, ids: Sequence[int] | frozenset[int], param: str) -> None:
    """Raises InvalidRequest for an id outside the vocabulary."""
    for bad in (min(ids, default=0), max(ids, default=0)):
        if not 0 <= bad < service.vocab_size:
            raise InvalidRequest(
                f"{param} must hold token ids from 0 to {service.vocab_size - 1}, got {shown(bad)}", param=param
            )


def check_params(service: Service, gen: GenSpec) -> None:
    """Raises InvalidRequest for parameters that name a token outside the vocabulary."""
    check_ids(service, [id for id, _ in gen.params.logit_bias], "logit_bias")
    check_ids(service, gen.stop_token_ids, "stop_token_ids")


def _request(service: Service, gen: GenSpec, prompt: list[int], param: str, priority: int) -> GenRequest:
    max_tokens = _max_tokens(service, gen, len(prompt), param)
    if gen.min_tokens > max_tokens:
        raise InvalidRequest(
            f"min_tokens must not be above the {max_tokens} tokens left of the context, got {shown(gen.min_tokens)}",
            param="min_tokens",
        )
    return GenRequest(
        prompt=tuple(prompt),
        max_tokens=max_tokens,
        params=_within_vocabulary(service, gen.params),
        seed=_seed(service, gen),
        stop_ids=gen.stop_token_ids if gen.ignore_eos else gen.stop_token_ids | service.stop_ids,
        min_tokens=gen.min_tokens,
        priority=priority,
    )


def _max_tokens(service: Service, gen: GenSpec, num_prompt_tokens: int, param: str) -> int:
    left = service.max_model_len - num_prompt_tokens
    if left < 1:
        raise ContextLengthExceeded(
            f"the prompt is too long: {param} has {num_prompt_tokens} tokens, which leaves no room to answer; this "
            f"model's maximum context length is {service.max_model_len} tokens",
            param=param,
        )
    if gen.max_tokens is None:
        return left
    if gen.max_tokens <= left:
        return gen.max_tokens
    if not gen.is_max_tokens_given:
        return left
    raise ContextLengthExceeded(
        f"{param} has {num_prompt_tokens} tokens and {gen.max_tokens_param} is {shown(gen.max_tokens)}; this model's "
        f"maximum context length is {service.max_model_len} tokens",
        param=gen.max_tokens_param,
    )


@contextmanager
def _naming(param: str) -> Iterator[None]:
    """Text is measured where nobody knows which field it came from."""
    try:
        yield
    except ContextLengthExceeded as error:
        raise ContextLengthExceeded(error.message, param=param) from None


def _within_vocabulary(service: Service, params: SamplingParams) -> SamplingParams:
    """``top_k`` past the vocabulary takes all of it, as the vocabulary's size does."""
    if params.top_k <= service.vocab_size:
        return params
    return replace(params, top_k=service.vocab_size)


def _seed(service: Service, gen: GenSpec) -> int:
    if gen.seed is not None:
        return gen.seed
    if service.default_seed is not None:
        return service.default_seed
    return secrets.randbelow(INT64_MAX - INT64_MIN + 1) + INT64_MIN
