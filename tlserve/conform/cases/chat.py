"""Chat completions that are sent whole."""

from __future__ import annotations

import json

from tlserve.conform.case import Cases
from tlserve.conform.found import Found
from tlserve.conform.subject import PROMPT, Subject, skip_unless

CASES = Cases("api.md#answers", "core")
MESSAGES, LENGTH = "api.md#messages", "api.md#length"
MAX_FILLED = 4096  # tokens of a context that a case may fill; filling more takes too long


def content_of(document: Found) -> str:
    return document["choices"][0]["message"]["content"].text()


@CASES.add("chat.shape", "an answer has id, object, created, model and one choice with the assistant's message")
async def shape(server: Subject) -> None:
    document = await server.chat()
    document["id"].check(bool(document["id"].text()), "not empty")
    document["object"].equals("chat.completion")
    document["created"].integer(1)
    document["model"].text()
    (choice,) = document["choices"].items(1)
    choice["index"].equals(0)
    choice["message"]["role"].equals("assistant")
    choice["message"]["content"].text()


@CASES.add("chat.fields", "fields without a value are there: refusal and logprobs are null", level="contract")
async def fields(server: Subject) -> None:
    document = await server.chat()
    document["model"].equals(server.model)
    document["system_fingerprint"].text()
    document["choices"][0]["logprobs"].equals(None)
    document["choices"][0]["message"]["refusal"].equals(None)


@CASES.add("chat.fingerprint", "system_fingerprint is the same in every answer", level="contract")
async def fingerprint(server: Subject) -> None:
    first, second = await server.chat(max_tokens=1), await server.complete(max_tokens=2)
    second["system_fingerprint"].equals(first["system_fingerprint"].text())


@CASES.add("chat.id", "every answer has an id of its own")
async def own_id(server: Subject) -> None:
    first, second = await server.chat(max_tokens=1), await server.chat(max_tokens=1)
    second["id"].check(first["id"].value != second["id"].value, "another id than the answer before")


@CASES.add("chat.usage", "usage has prompt_tokens, completion_tokens and their sum")
async def usage(server: Subject) -> None:
    counts = (await server.chat())["usage"]
    total = counts["prompt_tokens"].integer(1) + counts["completion_tokens"].integer(1)
    counts["total_tokens"].equals(total)


@CASES.add("chat.usage.cached", "usage always has prompt_tokens_details.cached_tokens", level="contract")
async def usage_cached(server: Subject) -> None:
    counts = (await server.chat())["usage"]
    cached = counts["prompt_tokens_details"]["cached_tokens"]
    cached.check(cached.integer() < counts["prompt_tokens"].integer(), "less than prompt_tokens")


@CASES.add("chat.usage.prompt", "prompt_tokens counts the rendered template", page="api.md#tokens", level="contract")
async def usage_prompt(server: Subject) -> None:
    for messages in (
        [{"role": "user", "content": "Hello"}],
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "ü😀 Hello"}],
    ):
        rendered = await server.tokens(messages=messages)
        document = await server.chat(messages=messages, max_tokens=1)
        document["usage"]["prompt_tokens"].equals(len(rendered))


@CASES.add("chat.finish.length", "an answer cut by max_tokens has finish_reason length", page=LENGTH)
async def finish_length(server: Subject) -> None:
    document = await server.chat(max_tokens=2)
    document["choices"][0]["finish_reason"].equals("length")


@CASES.add("chat.max_tokens", "max_tokens bounds completion_tokens, 1 included", page=LENGTH)
async def max_tokens(server: Subject) -> None:
    for count in (1, 5):
        used = (await server.chat(max_tokens=count))["usage"]["completion_tokens"]
        used.check(used.integer(1) <= count, f"{count} or less")


@CASES.add(
    "chat.max_completion_tokens", "max_completion_tokens bounds the answer, and wins over max_tokens", page=LENGTH
)
async def max_completion_tokens(server: Subject) -> None:
    for others in ({"max_tokens": None}, {"max_tokens": 9}):
        used = (await server.chat(max_completion_tokens=3, **others))["usage"]["completion_tokens"]
        used.check(used.integer(1) <= 3, "3 or less")


@CASES.add(
    "chat.max_tokens.absent",
    "without max_tokens an answer may fill the context",
    page=LENGTH,
    level="contract",
    is_alone=True,
)
async def max_tokens_absent(server: Subject) -> None:
    context = await server.context()
    skip_unless(context <= MAX_FILLED, f"a context of {context} tokens takes too long to fill")
    content, num_prompt = await _long_content(server, context)
    document = await server.chat(content, max_tokens=None, ignore_eos=True)
    document["choices"][0]["finish_reason"].equals("length")
    document["usage"]["completion_tokens"].equals(context - num_prompt)


async def _long_content(server: Subject, context: int) -> tuple[str, int]:
    """A message whose prompt almost fills the context, and its number of tokens."""

    async def count(num_words: int) -> int:
        return len(await server.tokens(messages=[{"role": "user", "content": " one" * num_words}]))

    few, many = await count(8), await count(40)
    num_words = 8 + (context - 8 - few) * 32 // max(many - few, 1)
    while (num_prompt := await count(num_words)) >= context:
        num_words -= 1
    return " one" * num_words, num_prompt


@CASES.add("chat.greedy", "temperature 0 gives the same text each time")
async def greedy(server: Subject) -> None:
    first, second = await server.chat(), await server.chat()
    second["choices"][0]["message"]["content"].equals(content_of(first))


@CASES.add("chat.system", "a system message is part of the prompt", page=MESSAGES)
async def system(server: Subject) -> None:
    turns = [{"role": "system", "content": "You answer in French, and never say why."}, _user(PROMPT)]
    plain = (await server.chat())["usage"]["prompt_tokens"].integer()
    used = (await server.chat(messages=turns))["usage"]["prompt_tokens"]
    used.check(used.integer() != plain, f"another number than the {plain} of the prompt without it")


@CASES.add("chat.history", "earlier turns of user and assistant are part of the prompt", page=MESSAGES)
async def history(server: Subject) -> None:
    turns = [_user("Hello"), {"role": "assistant", "content": "Good morning to you."}, _user(PROMPT)]
    plain = (await server.chat())["usage"]["prompt_tokens"].integer()
    used = (await server.chat(messages=turns))["usage"]["prompt_tokens"]
    used.check(used.integer() > plain, f"more than the {plain} of the last turn alone")


@CASES.add("chat.developer", "developer is rendered as system", page=MESSAGES, level="contract")
async def developer(server: Subject) -> None:
    turns = [[{"role": role, "content": "Be brief."}, _user(PROMPT)] for role in ("system", "developer")]
    as_system = await server.chat(messages=turns[0])
    as_developer = await server.chat(messages=turns[1])
    as_developer["usage"]["prompt_tokens"].equals(as_system["usage"]["prompt_tokens"].value)
    as_developer["choices"][0]["message"]["content"].equals(content_of(as_system))


@CASES.add(
    "chat.tool_turns",
    "turns with tool_calls and of tools are taken, with content null or absent",
    page=MESSAGES,
    level="contract",
)
async def tool_turns(server: Subject) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": json.dumps({"a": 2, "b": 2})}}
    result = {"role": "tool", "tool_call_id": "1", "content": "4"}
    for absent in ({"content": None}, {}):
        turns = [_user("2 + 2?"), {"role": "assistant", "tool_calls": [call], **absent}, result]
        await server.chat(messages=turns, max_tokens=1)


@CASES.add(
    "chat.special_tokens",
    "spellings of control tokens in a message are plain text",
    page=MESSAGES,
    level="contract",
)
async def special_tokens(server: Subject) -> None:
    """A control token would be one token; its letters are two or more in any vocabulary."""

    async def count(content: str) -> int:
        return len(await server.tokens(messages=[_user(content)]))

    empty = await count("x")
    for spelling in ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "</s>"):
        num_tokens = await count("x" + spelling)
        place = Found(num_tokens - empty, f"tokens of {spelling}", server.last_sent)
        place.check(num_tokens - empty >= 2, "2 or more")


def _user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}
