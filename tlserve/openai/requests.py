"""Every request field we read.

Rule 1: a field is here or it does not exist. What a request brings beyond these is ignored.
Rule 2: a bound that needs no model to check stands in the type; its ``description`` is the rule as a client
        reads it: "temperature must be <description>, got 3".
Rule 3: ``None`` is an absent field.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from tlserve.openai.meaning import extends, means

MAX_PROMPTS = 64
MAX_EMBEDDING_INPUTS = 2048
DEFAULT_COMPLETION_TOKENS = 16
TOKEN_ID_KEY = "(0|[1-9][0-9]{0,17})"  # a token id as the key of an object
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1

# Fields of OpenAI's reference that are taken, whatever they hold, and change nothing.
WITHOUT_EFFECT = (
    "user",
    "metadata",
    "store",
    "service_tier",
    "prompt_cache_key",
    "parallel_tool_calls",
    "reasoning_effort",
)

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
TokenIds = Annotated[list[TokenId], Meta(description="a list of token ids")]
Prompt = Annotated[
    str | list[int | str | list[TokenId]],
    Meta(description="a string, a list of token ids, or a list of those"),
]
Model = Annotated[String, means("The id of the served model, as `GET /v1/models` has it.")]


def _prompts(limit: int) -> dict[str, Any]:
    """A text, the ids of one, or up to ``limit`` of either; none of them empty."""
    text = {"type": "string", "minLength": 1}
    ids = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
    several = {"type": "array", "items": {"anyOf": [text, ids]}, "minItems": 1, "maxItems": limit}
    return {"anyOf": [text, ids, several]}


_BIASES = {
    "type": ["object", "null"],
    "propertyNames": {"pattern": f"^{TOKEN_ID_KEY}$"},
    "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
}
_TEXT_FORMAT = {"type": ["object", "null"], "properties": {"type": {"const": "text"}}, "required": ["type"]}


class StreamOptions(Struct):
    """What a stream brings besides the answer."""

    include_usage: Annotated[
        Flag | None, means("One more chunk at the end, with the usage and no choices.", default=False)
    ] = None


class FunctionCall(Struct):
    """The function of a call."""

    name: Annotated[String, means("Its name.")]
    arguments: Annotated[String, means("JSON as text.")]


class ToolCall(Struct):
    """A call that an assistant made."""

    id: Annotated[String, means("What the message with its result names as `tool_call_id`.")]
    function: FunctionCall
    type: Annotated[
        Annotated[Literal["function"], Meta(description='"function"')], means("The kind.", default="function")
    ] = "function"


ToolCalls = Annotated[
    list[Annotated[ToolCall, Meta(description="an object")]],
    Meta(description="a list of tool calls"),
]
Role = Annotated[
    Literal["system", "developer", "user", "assistant", "tool"],
    Meta(description="one of system, developer, user, assistant, tool"),
]


class Message(Struct):
    """One turn of a conversation."""

    role: Annotated[Role, means("Who speaks. `developer` is rendered as `system`.")]
    content: Annotated[
        Annotated[str | list[object], Meta(description="a string")] | None,
        means(
            "The text. Null or absent only beside the tool calls of an assistant. A list of parts: 422.",
            served={"type": ["string", "null"]},
        ),
    ] = None
    name: Annotated[String | None, means("For the template.")] = None
    tool_call_id: Annotated[String | None, means("For the template.")] = None
    tool_calls: Annotated[ToolCalls | None, means("What an assistant called; read of no other role.")] = None


Messages = Annotated[
    list[Annotated[Message, Meta(description="an object")]],
    Meta(min_length=1, description="a list of 1 or more messages"),
]


class GenerationRequest(Struct, kw_only=True):
    """What /v1/chat/completions and /v1/completions share."""

    model: Model
    max_tokens: Annotated[
        Positive | None, means("The most tokens of the answer. Absent: what the context has left.")
    ] = None
    temperature: Annotated[
        Annotated[float, Meta(ge=0, le=2, description="a number from 0 to 2")] | None,
        means("How far the draw strays from the most likely token; 0 is greedy.", default=1),
    ] = None
    top_p: Annotated[
        Annotated[float, Meta(gt=0, le=1, description="a number above 0 and up to 1")] | None,
        means("Draw from the fewest most likely tokens whose probabilities sum to this.", default=1),
    ] = None
    top_k: Annotated[
        Annotated[int, Meta(ge=-1, description="an integer of 1 or more, or -1 or 0 for off")] | None,
        extends("Draw from that many most likely tokens; -1 and 0 are off.", default=0),
    ] = None
    min_p: Annotated[
        Annotated[float, Meta(ge=0, le=1, description="a number from 0 to 1")] | None,
        extends("Leave out tokens less likely than this share of the most likely one's probability.", default=0),
    ] = None
    repetition_penalty: Annotated[
        Annotated[float, Meta(gt=0, description="a number above 0")] | None,
        extends("Above 1, tokens that were in the prompt or the answer become less likely.", default=1),
    ] = None
    presence_penalty: Annotated[
        Penalty | None, means("Taken once from the logit of each token generated so far.", default=0)
    ] = None
    frequency_penalty: Annotated[
        Penalty | None, means("Taken from a token's logit each time it was generated.", default=0)
    ] = None
    # Values are read by hand: msgspec does not say which key of a mapping broke a rule.
    logit_bias: Annotated[
        Annotated[dict[str, object], Meta(description="an object of token id: bias")] | None,
        means("What is added to the logits of tokens, by their ids.", served=_BIASES),
    ] = None
    seed: Annotated[
        Annotated[int, Meta(ge=INT64_MIN, le=INT64_MAX, description="a 64-bit signed integer")] | None,
        means("The same request with the same seed gives the same answer, bit for bit. Absent: a fresh one."),
    ] = None
    stop: Annotated[Stop | None, means("The answer ends before the first of these strings.")] = None
    stop_token_ids: Annotated[TokenIds | None, extends("Tokens that end the answer, as the model's own do.")] = None
    ignore_eos: Annotated[Flag | None, extends("The model's own tokens do not end the answer.", default=False)] = None
    min_tokens: Annotated[
        NonNegative | None,
        extends("Nothing ends the answer before it has that many tokens. Not above the maximum.", default=0),
    ] = None
    n: Annotated[
        Positive | None, means("Answers for each prompt. Above 1: 422.", default=1, served={"enum": [1, None]})
    ] = None
    stream: Annotated[Flag | None, means("Answer with server-sent events, as tokens come.", default=False)] = None
    stream_options: Annotated[
        Annotated[StreamOptions, Meta(description="an object")] | None, means("Needs `stream` to be true.")
    ] = None
    tools: Annotated[
        Annotated[list[object], Meta(description="a list")] | None,
        means("None are served. Anything in it: 422.", served={"type": ["array", "null"], "maxItems": 0}),
    ] = None
    tool_choice: Annotated[
        Annotated[str | dict[str, object], Meta(description="a string or an object")] | None,
        means("`auto`, `required` and an object: 422.", default="none", served={"enum": ["none", None]}),
    ] = None
    response_format: Annotated[
        Annotated[dict[str, object], Meta(description="an object")] | None,
        means("`json_object` and `json_schema`: 422.", default={"type": "text"}, served=_TEXT_FORMAT),
    ] = None


class ChatRequest(GenerationRequest, kw_only=True):
    """A conversation to answer."""

    messages: Annotated[Messages, means("The conversation so far.")]
    max_completion_tokens: Annotated[Positive | None, means("`max_tokens` by its newer name, which wins.")] = None
    logprobs: Annotated[Flag | None, means("Say how likely each token was.", default=False)] = None
    top_logprobs: Annotated[
        Annotated[int, Meta(ge=0, le=20, description="an integer from 0 to 20")] | None,
        means("How many of the most likely tokens to show for each token. Needs `logprobs` to be true."),
    ] = None


class CompletionRequest(GenerationRequest, kw_only=True):
    """Text to continue."""

    max_tokens: Annotated[
        Positive | None, means("The most tokens of the answer.", default=DEFAULT_COMPLETION_TOKENS)
    ] = None
    prompt: Annotated[
        Prompt, means("Text, token ids, or a list of those: one choice for each.", served=_prompts(MAX_PROMPTS))
    ]
    logprobs: Annotated[
        Annotated[int, Meta(ge=0, le=5, description="an integer from 0 to 5")] | None,
        means("Say how likely each token was, and show that many of the most likely."),
    ] = None
    echo: Annotated[Flag | None, means("true: 422.", default=False, served={"enum": [False, None]})] = None
    best_of: Annotated[Positive | None, means("Above 1: 422.", default=1, served={"enum": [1, None]})] = None
    suffix: Annotated[String | None, means("Any text: 422.", default="", served={"enum": ["", None]})] = None


class EmbeddingRequest(Struct, kw_only=True):
    """Texts to turn into vectors."""

    model: Model
    input: Annotated[
        Prompt,
        means("Text, token ids, or a list of those: one vector for each.", served=_prompts(MAX_EMBEDDING_INPUTS)),
    ]
    encoding_format: Annotated[
        Annotated[Literal["float", "base64"], Meta(description='"float" or "base64"')] | None,
        means("Numbers, or little-endian float32 in base64.", default="float"),
    ] = None
    dimensions: Annotated[Positive | None, means("The length of the model's vectors; another number: 422.")] = None


class TokenizeRequest(Struct, kw_only=True):
    """Text, or messages, to turn into token ids; exactly one of the two."""

    model: Model
    text: Annotated[String | None, extends("Text. Spellings of control tokens become control tokens.")] = None
    messages: Annotated[Messages | None, extends("Messages, for the prompt that chat would make of them.")] = None
    add_special_tokens: Annotated[
        Flag | None, extends("With `text`: add what the tokenizer puts in front of every text.", default=False)
    ] = None


class DetokenizeRequest(Struct, kw_only=True):
    """Token ids to turn into text."""

    model: Model
    tokens: Annotated[TokenIds, extends("Ids of the model's vocabulary. Control tokens are spelled out.")]
