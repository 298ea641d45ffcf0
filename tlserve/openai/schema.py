"""Every document we answer with. A field that is ``UNSET`` is left out; all others are always there."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import UNSET, Raw, Struct, UnsetType

from tlserve.openai.meaning import means

Created = Annotated[int, means("Unix time in seconds.")]
ModelId = Annotated[str, means("The served model.")]
Fingerprint = Annotated[
    str, means("Of the weights and the numeric settings: while it stays, seeds give the same answers.")
]
Index = Annotated[int, means("The place of the prompt or input that this is for.")]
FinishReason = Annotated[
    str,
    means(
        "`stop`: a token or string that ends the answer. `length`: the maximum was reached.",
        served={"type": "string", "enum": ["stop", "length"]},
    ),
]
ServiceTier = Annotated[Literal["default"], means("Always the same.")]
Refusal = Annotated[None, means("Never used.")]


class ErrorDetail(Struct):
    """What went wrong."""

    message: Annotated[str, means("The value and the rule it breaks, for a person.")]
    type: Annotated[str, means("The kind of fault.")]
    param: Annotated[str | None, means("The field or header to blame, as `messages[0].role`.")]
    code: Annotated[str | None, means("The fault, for a program.")]


class ErrorDocument(Struct):
    """Every error, alone or as the last event of a stream."""

    error: ErrorDetail


class PromptTokensDetails(Struct):
    """Of the tokens of a prompt."""

    cached_tokens: Annotated[int, means("Found in the prefix cache.")]
    audio_tokens: Annotated[int, means("Always 0.")] = 0


class CompletionTokensDetails(Struct):
    """Kinds of token this server never makes; clients of the reference read the fields all the same."""

    reasoning_tokens: Annotated[int, means("Always 0.")] = 0
    audio_tokens: Annotated[int, means("Always 0.")] = 0
    accepted_prediction_tokens: Annotated[int, means("Always 0.")] = 0
    rejected_prediction_tokens: Annotated[int, means("Always 0.")] = 0


class Usage(Struct, kw_only=True):
    """Tokens, of all choices or inputs together."""

    prompt_tokens: Annotated[int, means("Of the prompts.")]
    completion_tokens: Annotated[
        int | UnsetType, means("Drawn by the model, the one that ended the answer included; not on embeddings.")
    ] = UNSET
    total_tokens: Annotated[int, means("The sum.")]
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


TokenText = Annotated[str, means("A spelling to read; what is no character appears as U+FFFD.")]
Logprob = Annotated[float, means("Of the model's own distribution; -9999 for what cannot come.")]
TokenBytes = Annotated[list[int], means("What the token adds to the text, before what is no character is replaced.")]


class TopLogprob(Struct):
    """One of the most likely tokens of a place."""

    token: TokenText
    logprob: Logprob
    bytes: TokenBytes


class TokenLogprob(Struct):
    """A generated token, and what else was likely in its place."""

    token: TokenText
    logprob: Logprob
    bytes: TokenBytes
    top_logprobs: Annotated[list[TopLogprob], means("Most likely first.")]


class ChatLogprobs(Struct):
    """Log-probabilities of a chat answer or chunk."""

    content: Annotated[list[TokenLogprob], means("One entry for each generated token.")]
    refusal: Refusal = None


class AssistantMessage(Struct, kw_only=True):
    """The answer."""

    role: Literal["assistant"] = "assistant"
    content: Annotated[str, means("Its text.")]
    refusal: Refusal = None
    annotations: Annotated[tuple[()], means("Always empty.")] = ()


class ChatChoice(Struct):
    """One answer."""

    index: Index
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


class ChatCompletion(Struct, kw_only=True):
    """A whole answer of chat."""

    id: Annotated[str, means("Begins with `chatcmpl-`.")]
    object: Literal["chat.completion"] = "chat.completion"
    created: Created
    model: ModelId
    choices: list[ChatChoice]
    usage: Usage
    service_tier: ServiceTier = "default"
    system_fingerprint: Fingerprint


class Delta(Struct, kw_only=True):
    """What a chunk adds to the answer."""

    role: Annotated[Literal["assistant"] | UnsetType, means("In the first chunk only.")] = UNSET
    content: Annotated[str, means("Joined over all chunks it is the whole text.")]


class ChatChunkChoice(Struct):
    """One answer's part of a chunk."""

    index: Index
    delta: Delta
    logprobs: Annotated[ChatLogprobs | None, means("Of all tokens since the last chunk.")] = None
    finish_reason: Annotated[FinishReason | None, means("A word on the last content chunk, null before.")] = None


class ChatChunk(Struct, kw_only=True):
    """An event of a stream of chat."""

    id: Annotated[str, means("Begins with `chatcmpl-`; one for all chunks of a stream.")]
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: Created
    model: ModelId
    service_tier: ServiceTier = "default"
    system_fingerprint: Fingerprint
    choices: Annotated[list[ChatChunkChoice], means("None in the chunk with the usage, else one.")]
    usage: Annotated[Usage | UnsetType | None, means("Only when asked for: null in all chunks but the last.")] = UNSET


class CompletionLogprobs(Struct):
    """Parallel lists, one entry a token."""

    tokens: Annotated[list[str], means("Spellings to read.")]
    token_logprobs: Annotated[list[float], means("Of the model's own distribution; -9999 for what cannot come.")]
    top_logprobs: Annotated[list[dict[str, float]], means("The most likely tokens and the drawn one.")]
    text_offset: Annotated[list[int], means("In code points from the start of the choice's text.")]


class CompletionChoice(Struct):
    """Of a whole answer, where ``finish_reason`` is a word, and of a chunk, where it may be null."""

    index: Index
    text: Annotated[str, means("The text, or what a chunk adds to it.")]
    logprobs: CompletionLogprobs | None = None
    finish_reason: Annotated[FinishReason | None, means("A word at the end, null in the chunks before.")] = None


class Completion(Struct, kw_only=True):
    """``text_completion``: a whole answer, or one chunk of a stream (the reference has one shape for both)."""

    id: Annotated[str, means("Begins with `cmpl-`; one for all chunks of a stream.")]
    object: Literal["text_completion"] = "text_completion"
    created: Created
    model: ModelId
    system_fingerprint: Fingerprint
    choices: Annotated[list[CompletionChoice], means("None in the chunk with the usage.")]
    usage: Annotated[
        Usage | UnsetType | None,
        means("Always on a whole answer. In a stream only when asked for: null in all chunks but the last."),
    ] = UNSET


class Embedding(Struct, kw_only=True):
    """The vector of one input."""

    object: Literal["embedding"] = "embedding"
    index: Index
    # encoded as soon as it is known
    embedding: Annotated[
        Raw,
        means(
            "Of unit length: numbers, or little-endian float32 in base64.",
            served={
                "anyOf": [
                    {"type": "array", "items": {"type": "number"}},
                    {"type": "string", "contentEncoding": "base64"},
                ]
            },
        ),
    ]


class EmbeddingList(Struct, kw_only=True):
    """The vectors, in the order of the inputs."""

    object: Literal["list"] = "list"
    data: list[Embedding]
    model: ModelId
    usage: Usage


class TokenizeResponse(Struct):
    """The tokens of a text."""

    tokens: Annotated[list[int], means("Token ids.")]
    count: Annotated[int, means("How many.")]
    max_model_len: Annotated[int, means("Tokens of the context: prompt and answer together.")]


class DetokenizeResponse(Struct):
    """The text of tokens."""

    text: Annotated[str, means("What is no UTF-8 appears as U+FFFD.")]


class ModelCard(Struct, kw_only=True):
    """A served model."""

    id: Annotated[str, means("What requests name as `model`.")]
    object: Literal["model"] = "model"
    created: Created
    owned_by: Annotated[str, means("Always the same.")] = "trio-tlserve"


class ModelList(Struct, kw_only=True):
    """The served models: one."""

    object: Literal["list"] = "list"
    data: list[ModelCard]
