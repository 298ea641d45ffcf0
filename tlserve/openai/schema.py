"""The wire: every request field we read and every document we answer with.

Rule 1: a field is here or it does not exist. What a request brings beyond these is ignored.
Rule 2: a bound that needs no model to check stands in the type; its ``description`` is the rule as a client
        reads it: "temperature must be <description>, got 3".
Rule 3: ``None`` in a request is an absent field; ``UNSET`` in a response is one that is left out.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import UNSET, Meta, Raw, Struct, UnsetType

MAX_PROMPTS = 64
MAX_EMBEDDING_INPUTS = 2048
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1

# --- requests -----------------------------------------------------------------------------------------------

String = Annotated[str, Meta(description="a string")]
Flag = Annotated[bool, Meta(description="true or false")]
Positive = Annotated[int, Meta(ge=1, description="an integer of 1 or more")]
NonNegative = Annotated[int, Meta(ge=0, description="an integer of 0 or more")]
Penalty = Annotated[float, Meta(ge=-2, le=2, description="a number from -2 to 2")]
StopString = Annotated[str, Meta(min_length=1, description="a string that is not empty")]
Stop = Annotated[
    StopString | Annotated[list[StopString], Meta(max_length=4)],
    Meta(description="a string or a list of up to 4 strings, none of them empty"),
]
TokenId = Annotated[int, Meta(ge=0, description="a token id")]
Prompt = Annotated[
    str | list[int | str | list[TokenId]],
    Meta(description="a string, a list of token ids, or a list of those"),
]


class StreamOptions(Struct):
    include_usage: Flag | None = None


class FunctionCall(Struct):
    name: String
    arguments: String


class ToolCall(Struct):
    id: String
    function: FunctionCall
    type: Annotated[Literal["function"], Meta(description='"function"')] = "function"


ToolCalls = Annotated[
    list[Annotated[ToolCall, Meta(description="an object")]],
    Meta(description="a list of tool calls"),
]
Role = Annotated[
    Literal["system", "developer", "user", "assistant", "tool"],
    Meta(description="one of system, developer, user, assistant, tool"),
]


class Message(Struct):
    role: Role
    content: Annotated[str | list[object], Meta(description="a string")] | None = None
    name: String | None = None
    tool_call_id: String | None = None
    tool_calls: (
        Annotated[list[Annotated[ToolCall, Meta(description="an object")]], Meta(description="a list of tool calls")]
        | None
    ) = None


Messages = Annotated[
    list[Annotated[Message, Meta(description="an object")]],
    Meta(min_length=1, description="a list of 1 or more messages"),
]


class GenerationRequest(Struct, kw_only=True):
    """What /v1/chat/completions and /v1/completions share."""

    model: String
    max_tokens: Positive | None = None
    temperature: Annotated[float, Meta(ge=0, le=2, description="a number from 0 to 2")] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1, description="a number above 0 and up to 1")] | None = None
    top_k: Annotated[int, Meta(ge=-1, description="an integer of 1 or more, or -1 or 0 for off")] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1, description="a number from 0 to 1")] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, description="a number above 0")] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    # Values are read by hand: msgspec does not say which key of a mapping broke a rule.
    logit_bias: Annotated[dict[str, object], Meta(description="an object of token id: bias")] | None = None
    seed: Annotated[int, Meta(ge=INT64_MIN, le=INT64_MAX, description="a 64-bit signed integer")] | None = None
    stop: Stop | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(description="a list of token ids")] | None = None
    ignore_eos: Flag | None = None
    min_tokens: NonNegative | None = None
    n: Positive | None = None
    stream: Flag | None = None
    stream_options: Annotated[StreamOptions, Meta(description="an object")] | None = None
    tools: Annotated[list[object], Meta(description="a list")] | None = None
    tool_choice: Annotated[str | dict[str, object], Meta(description="a string or an object")] | None = None
    response_format: Annotated[dict[str, object], Meta(description="an object")] | None = None


class ChatRequest(GenerationRequest, kw_only=True):
    messages: Messages
    max_completion_tokens: Positive | None = None
    logprobs: Flag | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20, description="an integer from 0 to 20")] | None = None


class CompletionRequest(GenerationRequest, kw_only=True):
    prompt: Prompt
    logprobs: Annotated[int, Meta(ge=0, le=5, description="an integer from 0 to 5")] | None = None
    echo: Flag | None = None
    best_of: Positive | None = None
    suffix: String | None = None


class EmbeddingRequest(Struct, kw_only=True):
    model: String
    input: Prompt
    encoding_format: Annotated[Literal["float", "base64"], Meta(description='"float" or "base64"')] | None = None
    dimensions: Positive | None = None


class TokenizeRequest(Struct, kw_only=True):
    model: String
    text: String | None = None
    messages: Messages | None = None
    add_special_tokens: Flag | None = None


class DetokenizeRequest(Struct, kw_only=True):
    model: String
    tokens: Annotated[list[TokenId], Meta(description="a list of token ids")]


# --- responses ----------------------------------------------------------------------------------------------


class ErrorDetail(Struct):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorDocument(Struct):
    error: ErrorDetail


class PromptTokensDetails(Struct):
    cached_tokens: int
    audio_tokens: int = 0


class CompletionTokensDetails(Struct):
    """Kinds of token this server never makes; clients of the reference read the fields all the same."""

    reasoning_tokens: int = 0
    audio_tokens: int = 0
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0


class Usage(Struct, kw_only=True):
    prompt_tokens: int
    completion_tokens: int | UnsetType = UNSET  # not on embeddings
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


class TopLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int]  # what the token adds to the text, before what is no character is replaced
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    content: list[TokenLogprob]
    refusal: None = None


class AssistantMessage(Struct, kw_only=True):
    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None
    annotations: tuple[()] = ()


class ChatChoice(Struct):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: str


class ChatCompletion(Struct, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    service_tier: Literal["default"] = "default"
    system_fingerprint: str


class Delta(Struct, kw_only=True):
    role: Literal["assistant"] | UnsetType = UNSET  # in the first chunk only
    content: str


class ChatChunkChoice(Struct):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None


class ChatChunk(Struct, kw_only=True):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    service_tier: Literal["default"] = "default"
    system_fingerprint: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET


class CompletionLogprobs(Struct):
    """Parallel lists, one entry a token. ``text_offset`` counts code points from the start of ``text``."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(Struct):
    """Of a whole answer, where ``finish_reason`` is a word, and of a chunk, where it may be null."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None


class Completion(Struct, kw_only=True):
    """``text_completion``: a whole answer, or one chunk of a stream (the reference has one shape for both)."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET


class Embedding(Struct, kw_only=True):
    object: Literal["embedding"] = "embedding"
    index: int
    embedding: Raw  # a list of floats or one base64 string, encoded as soon as it is known


class EmbeddingList(Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: Usage


class TokenizeResponse(Struct):
    tokens: list[int]
    count: int
    max_model_len: int


class DetokenizeResponse(Struct):
    text: str


class ModelCard(Struct, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "trio-tlserve"


class ModelList(Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[ModelCard]
