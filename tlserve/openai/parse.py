"""Bodies to specs: everything about a request that can be checked without knowing the model.

Values that are wrong are 400 (InvalidRequest); values that are right and not served here are 422
(UnsupportedParameter). What needs the model's sizes (token ids, the context) is ``prepare``'s.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from tlserve.engine.request import SamplingParams
from tlserve.errors import InvalidRequest, UnsupportedParameter
from tlserve.openai import body, requests

TokensOrText = str | list[int]

# Below this temperature every distance float32 can tell between two logits is a certainty: it is greedy.
# The floor also keeps 1/temperature finite.
MIN_TEMPERATURE = 1e-5
# Beyond these the effect no longer grows, and float32 would overflow.
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 1e-6, 1e6
# Whatever the vocabulary, this keeps exactly the most likely token; float32 would round less to nothing.
MIN_TOP_P = 1e-6

_CANONICAL_ID = re.compile(rf"{requests.TOKEN_ID_KEY}\Z", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenSpec:
    """One generation as asked for. Token ids are not yet held against the vocabulary."""

    model: str
    max_tokens: int | None  # None: what is left of the context
    max_tokens_param: str  # the field that ``max_tokens`` came from
    is_max_tokens_given: bool  # a default gives way to the context, a given number is refused
    params: SamplingParams
    seed: int | None
    stop: tuple[str, ...]
    stop_token_ids: frozenset[int]
    ignore_eos: bool
    min_tokens: int
    stream: bool
    include_usage: bool


@dataclass(frozen=True, slots=True)
class ChatSpec:
    gen: GenSpec
    messages: list[dict[str, object]]  # as templates read them


@dataclass(frozen=True, slots=True)
class CompletionSpec:
    gen: GenSpec
    prompts: list[TokensOrText]
    is_list: bool  # whether errors name ``prompt[i]`` or ``prompt``


@dataclass(frozen=True, slots=True)
class EmbeddingSpec:
    model: str
    inputs: list[TokensOrText]
    is_list: bool
    encoding_format: str
    dimensions: int | None


@dataclass(frozen=True, slots=True)
class TokenizeSpec:
    """Exactly one of ``text`` and ``messages`` is set."""

    model: str
    text: str | None
    messages: list[dict[str, object]] | None
    add_special_tokens: bool


@dataclass(frozen=True, slots=True)
class DetokenizeSpec:
    model: str
    tokens: list[int]


def parse_chat(raw: bytes) -> ChatSpec:
    """A body of /v1/chat/completions. Raises InvalidRequest, UnsupportedParameter."""
    request = body.read(raw, requests.ChatRequest)
    messages = _messages(request.messages)
    if request.top_logprobs is not None and not request.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs to be true", param="top_logprobs")
    wins = request.max_completion_tokens is not None
    gen = _generation(
        request,
        max_tokens=request.max_completion_tokens if wins else request.max_tokens,
        max_tokens_param="max_completion_tokens" if wins else "max_tokens",
        num_logprobs=(request.top_logprobs or 0) if request.logprobs else None,
    )
    return ChatSpec(gen, messages)


def parse_completion(raw: bytes) -> CompletionSpec:
    """A body of /v1/completions. Raises InvalidRequest, UnsupportedParameter."""
    request = body.read(raw, requests.CompletionRequest)
    prompts, is_list = _prompts(request.prompt, "prompt", requests.MAX_PROMPTS)
    if request.echo:
        raise UnsupportedParameter("echo is not supported", param="echo")
    if request.best_of is not None and request.best_of > 1:
        raise UnsupportedParameter(
            f"best_of above 1 is not supported, got {body.shown(request.best_of)}", param="best_of"
        )
    if request.suffix:
        raise UnsupportedParameter("suffix is not supported", param="suffix")
    gen = _generation(
        request,
        max_tokens=requests.DEFAULT_COMPLETION_TOKENS if request.max_tokens is None else request.max_tokens,
        max_tokens_param="max_tokens",
        num_logprobs=request.logprobs,
    )
    return CompletionSpec(gen, prompts, is_list)


def parse_embeddings(raw: bytes) -> EmbeddingSpec:
    """A body of /v1/embeddings. Raises InvalidRequest."""
    request = body.read(raw, requests.EmbeddingRequest)
    inputs, is_list = _prompts(request.input, "input", requests.MAX_EMBEDDING_INPUTS)
    return EmbeddingSpec(request.model, inputs, is_list, request.encoding_format or "float", request.dimensions)


def parse_tokenize(raw: bytes) -> TokenizeSpec:
    """A body of /v1/tokenize. Raises InvalidRequest, UnsupportedParameter."""
    request = body.read(raw, requests.TokenizeRequest)
    if (request.text is None) == (request.messages is None):
        raise InvalidRequest("give either text or messages", param="text")
    messages = None if request.messages is None else _messages(request.messages)
    return TokenizeSpec(request.model, request.text, messages, bool(request.add_special_tokens))


def parse_detokenize(raw: bytes) -> DetokenizeSpec:
    """A body of /v1/detokenize. Raises InvalidRequest."""
    request = body.read(raw, requests.DetokenizeRequest)
    return DetokenizeSpec(request.model, request.tokens)


def _generation(
    request: requests.GenerationRequest, *, max_tokens: int | None, max_tokens_param: str, num_logprobs: int | None
) -> GenSpec:
    _refuse_unsupported(request)
    if request.stream_options is not None and not request.stream:
        raise InvalidRequest("stream_options needs stream to be true", param="stream_options")
    min_tokens = request.min_tokens or 0
    if max_tokens is not None and min_tokens > max_tokens:
        raise InvalidRequest(
            f"min_tokens must not be above {max_tokens_param} ({body.shown(max_tokens)}), got {body.shown(min_tokens)}",
            param="min_tokens",
        )
    stop = request.stop or []
    return GenSpec(
        model=request.model,
        max_tokens=max_tokens,
        max_tokens_param=max_tokens_param,
        is_max_tokens_given=getattr(request, max_tokens_param) is not None,
        params=_sampling(request, num_logprobs),
        seed=request.seed,
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        stop_token_ids=frozenset(request.stop_token_ids or ()),
        ignore_eos=bool(request.ignore_eos),
        min_tokens=min_tokens,
        stream=bool(request.stream),
        include_usage=bool(request.stream_options and request.stream_options.include_usage),
    )


def _sampling(request: requests.GenerationRequest, num_logprobs: int | None) -> SamplingParams:
    temperature = 1.0 if request.temperature is None else request.temperature
    repetition = 1.0 if request.repetition_penalty is None else request.repetition_penalty
    return SamplingParams(
        temperature=temperature if temperature >= MIN_TEMPERATURE else 0.0,
        top_k=max(request.top_k or 0, 0),
        top_p=1.0 if request.top_p is None else max(request.top_p, MIN_TOP_P),
        min_p=request.min_p or 0.0,
        repetition_penalty=min(max(repetition, MIN_REPETITION_PENALTY), MAX_REPETITION_PENALTY),
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        logit_bias=_logit_bias(request.logit_bias or {}),
        num_logprobs=num_logprobs,
    )


def _logit_bias(given: Mapping[str, object]) -> tuple[tuple[int, float], ...]:
    bias: list[tuple[int, float]] = []
    for key, value in given.items():
        if not _CANONICAL_ID.match(key):
            raise InvalidRequest(f"logit_bias keys must be token ids, got {body.shown(key)}", param="logit_bias")
        if isinstance(value, bool) or not isinstance(value, int | float) or not -100 <= value <= 100:
            raise InvalidRequest(
                f"logit_bias values must be numbers from -100 to 100, got {body.shown(value)} for {key}",
                param="logit_bias",
            )
        bias.append((int(key), float(value)))
    return tuple(bias)


def _refuse_unsupported(request: requests.GenerationRequest) -> None:
    if request.n is not None and request.n > 1:
        raise UnsupportedParameter(f"n above 1 is not supported, got {body.shown(request.n)}", param="n")
    if request.tools:
        raise UnsupportedParameter("tools are not supported", param="tools")
    _check_tool_choice(request.tool_choice)
    _check_response_format(request.response_format)


def _check_tool_choice(choice: str | dict[str, object] | None) -> None:
    if choice is None or choice == "none":
        return
    if isinstance(choice, str) and choice not in ("auto", "required"):
        raise InvalidRequest(
            f'tool_choice must be "none", "auto", "required" or an object, got {body.shown(choice)}',
            param="tool_choice",
        )
    raise UnsupportedParameter(
        f'tool_choice other than "none" is not supported, got {body.shown(choice)}', param="tool_choice"
    )


def _check_response_format(response_format: dict[str, object] | None) -> None:
    if response_format is None:
        return
    kind = response_format.get("type")
    if kind in ("json_object", "json_schema"):
        raise UnsupportedParameter(f"response_format {kind} is not supported", param="response_format")
    if kind != "text":
        raise InvalidRequest(
            f'response_format.type must be "text", "json_object" or "json_schema", got {body.shown(kind)}',
            param="response_format.type",
        )


def _messages(messages: list[requests.Message]) -> list[dict[str, object]]:
    return [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _message(message: requests.Message, param: str) -> dict[str, object]:
    """The message as the chat encoder takes it: absent fields have no key; content is there, null beside tool calls."""
    if isinstance(message.content, list):
        raise UnsupportedParameter(
            f"{param}.content as a list of parts is not supported, send a string", param=f"{param}.content"
        )
    is_call = message.role == "assistant" and bool(message.tool_calls)
    if message.content is None and not is_call:
        raise InvalidRequest(f"{param}.content is required and must not be null", param=f"{param}.content")
    fields: dict[str, object] = {"role": message.role, "content": message.content}
    if message.name is not None:
        fields["name"] = message.name
    if message.tool_call_id is not None:
        fields["tool_call_id"] = message.tool_call_id
    if is_call:
        fields["tool_calls"] = [
            {
                "id": call.id,
                "type": call.type,
                "function": {"name": call.function.name, "arguments": call.function.arguments},
            }
            for call in message.tool_calls or ()
        ]
    return fields


def _prompts(given: str | list[int | str | list[int]], param: str, limit: int) -> tuple[list[TokensOrText], bool]:
    """The prompts in ``given``, and whether it was a list of them. Raises InvalidRequest.

    A list of integers is one prompt; a list that holds anything else is a list of prompts.
    """
    if isinstance(given, str) or (given and set(map(type, given)) == {int}):
        return [_prompt(given, param)], False  # type: ignore[arg-type]  # all of its items are ints
    if not 1 <= len(given) <= limit:
        raise InvalidRequest(f"{param} must be a list of 1 to {limit} items, got {len(given)}", param=param)
    return [_prompt(item, f"{param}[{index}]") for index, item in enumerate(given)], True


def _prompt(given: int | str | list[int], param: str) -> TokensOrText:
    if isinstance(given, int):
        raise InvalidRequest(
            f"{param} must be a string or a list of token ids, as its neighbours are, got {body.shown(given)}",
            param=param,
        )
    if not given:
        raise InvalidRequest(f"{param} must not be empty", param=param)
    return given
