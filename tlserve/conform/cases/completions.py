"""POST /v1/completions."""

from __future__ import annotations

from tlserve.conform.case import Cases
from tlserve.conform.subject import COMPLETIONS, PROMPT, Subject

CASES = Cases("api.md#prompts", "core")
PROMPTS = [PROMPT, "The sea is", "Once upon a time"]


@CASES.add("completions.shape", "an answer has id, object, created, model and one choice with its text")
async def shape(server: Subject) -> None:
    document = await server.complete()
    document["id"].text()
    document["object"].equals("text_completion")
    document["created"].integer(1)
    document["model"].text()
    (choice,) = document["choices"].items(1)
    choice["index"].equals(0)
    choice["text"].text()
    choice["finish_reason"].is_in(("stop", "length"))


@CASES.add("completions.fields", "fields without a value are there: logprobs is null", level="contract")
async def fields(server: Subject) -> None:
    document = await server.complete()
    document["model"].equals(server.model)
    document["system_fingerprint"].text()
    document["choices"][0]["logprobs"].equals(None)
    document["usage"]["prompt_tokens_details"]["cached_tokens"].integer()


@CASES.add("completions.usage", "usage has prompt_tokens, completion_tokens and their sum")
async def usage(server: Subject) -> None:
    counts = (await server.complete())["usage"]
    total = counts["prompt_tokens"].integer(1) + counts["completion_tokens"].integer(1)
    counts["total_tokens"].equals(total)


@CASES.add("completions.default_length", "without max_tokens there are 16", page="api.md#length", level="contract")
async def default_length(server: Subject) -> None:
    document = await server.complete(max_tokens=None, ignore_eos=True)
    document["usage"]["completion_tokens"].equals(16)


@CASES.add("completions.stream.done", "the last event is [DONE]", page="api.md#streams")
async def stream_done(server: Subject) -> None:
    answer = await server.stream(COMPLETIONS, server.text_body())
    if not answer.is_done:
        answer.fail("data: [DONE] at the end", repr(answer.body[-60:].decode("utf-8", "replace")))


@CASES.add("completions.stream.object", "every chunk is a text_completion with one id", page="api.md#streams")
async def stream_object(server: Subject) -> None:
    events = (await server.stream(COMPLETIONS, server.text_body())).events()
    for event in events:
        event["object"].equals("text_completion")
        event["id"].equals(events[0]["id"].text())


@CASES.add(
    "completions.stream.equals_nonstream", "the joined texts are the text of the whole answer", page="api.md#streams"
)
async def stream_equals_nonstream(server: Subject) -> None:
    whole = (await server.complete(max_tokens=32))["choices"][0]["text"]
    answer = await server.stream(COMPLETIONS, server.text_body(max_tokens=32))
    if answer.text() != whole.value:
        answer.fail(repr(whole.value), repr(answer.text()))


@CASES.add("completions.stream.finish", "finish_reason is null in all chunks but the last", page="api.md#streams")
async def stream_finish(server: Subject) -> None:
    *others, last = (await server.stream(COMPLETIONS, server.text_body())).choices()
    last["finish_reason"].is_in(("stop", "length"))
    for choice in others:
        choice["finish_reason"].equals(None)


@CASES.add("completions.stream.usage", "with include_usage the last chunk has the usage", page="api.md#streams")
async def stream_usage(server: Subject) -> None:
    fields = {"stream_options": {"include_usage": True}}
    last = (await server.stream(COMPLETIONS, server.text_body(**fields))).events()[-1]
    last["choices"].equals([])
    whole = (await server.complete())["usage"]
    last["usage"]["total_tokens"].equals(whole["total_tokens"].value)


@CASES.add("completions.prompts", "a list of prompts gives a choice for each, with its index, and one usage")
async def prompts(server: Subject) -> None:
    alone = [await server.complete(prompt) for prompt in PROMPTS]
    together = await server.complete(PROMPTS)
    for index, choice in enumerate(together["choices"].items(len(PROMPTS))):
        choice["index"].equals(index)
        choice["text"].equals(alone[index]["choices"][0]["text"].value)
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        together["usage"][name].equals(sum(document["usage"][name].integer() for document in alone))


@CASES.add("completions.prompts.stream", "the choices of a stream are told apart by their index")
async def prompts_streamed(server: Subject) -> None:
    whole = await server.complete(PROMPTS)
    answer = await server.stream(COMPLETIONS, server.text_body(PROMPTS))
    choices = [choice for event in answer.events() for choice in event["choices"].items()]
    for index, wanted in enumerate(whole["choices"].items(len(PROMPTS))):
        text = "".join(choice["text"].text() for choice in choices if choice["index"].value == index)
        if text != wanted["text"].value:
            answer.fail(f"choice {index}: {wanted['text'].value!r}", repr(text))


@CASES.add("completions.prompt_ids", "token ids are a prompt, and so is a list of such lists", level="contract")
async def prompt_ids(server: Subject) -> None:
    ids = await server.tokens(text=PROMPT, add_special_tokens=True)
    wanted = (await server.complete())["choices"][0]["text"].value
    for given, count in ((ids, 1), ([ids, ids], 2), ([PROMPT, ids], 2)):
        document = await server.complete(given)
        for choice in document["choices"].items(count):
            choice["text"].equals(wanted)
