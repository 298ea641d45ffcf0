"""Streams of chat: framing, order and content of the chunks."""

from __future__ import annotations

import json

from tlserve.conform.answer import Answer
from tlserve.conform.case import Cases
from tlserve.conform.subject import CHAT, PROMPT, Body, Subject, skip_unless

CASES = Cases("api.md#streams", "core")
USAGE = {"stream_options": {"include_usage": True}}
PING = ": ping"  # sent when there has been no event for a while
SPLIT = "\N{GRINNING FACE}"  # four bytes, one token only in a vocabulary that knows it


async def streamed(server: Subject, content: str = PROMPT, /, **fields: object) -> Answer:
    return await server.stream(CHAT, server.chat_body(content, **fields))


@CASES.add("chat.stream.content_type", "a stream is text/event-stream")
async def content_type(server: Subject) -> None:
    kind = (await streamed(server)).header("content-type")
    kind.check(kind.text().split(";")[0] == "text/event-stream", "text/event-stream")


@CASES.add("chat.stream.headers", "a stream's headers keep proxies from holding it back", level="contract")
async def headers(server: Subject) -> None:
    answer = await streamed(server)
    answer.header("content-type").check(
        answer.header("content-type").text().endswith("; charset=utf-8"), "with charset=utf-8"
    )
    answer.header("cache-control").equals("no-store")
    answer.header("x-accel-buffering").equals("no")


@CASES.add(
    "chat.stream.framing",
    "an event is one line `data: JSON` and an empty line",
    level="contract",
)
async def framing(server: Subject) -> None:
    answer = await streamed(server, **USAGE)
    *frames, end = answer.body.split(b"\n\n")
    if end:
        answer.fail("an empty line at the end", repr(end[-40:]))
    for frame in frames:
        text = frame.decode("utf-8", "replace")
        if (text != PING and not text.startswith("data: ")) or len(text.splitlines()) != 1:
            answer.fail("one line that begins with `data: ` an event", repr(text))


@CASES.add("chat.stream.done", "the last event is [DONE]")
async def done(server: Subject) -> None:
    answer = await streamed(server)
    if not answer.is_done:
        answer.fail("data: [DONE] at the end", repr(answer.body[-60:].decode("utf-8", "replace")))


@CASES.add("chat.stream.object", "every chunk is a chat.completion.chunk with an index in its choice")
async def chunk_object(server: Subject) -> None:
    answer = await streamed(server, **USAGE)
    for event in answer.events():
        event["object"].equals("chat.completion.chunk")
    for choice in answer.choices():
        choice["index"].equals(0)


@CASES.add("chat.stream.one_id", "one id, one created and one model throughout")
async def one_id(server: Subject) -> None:
    first, *rest = (await streamed(server, **USAGE)).events()
    for name in ("id", "created", "model"):
        for event in rest:
            event[name].equals(first[name].value)


@CASES.add("chat.stream.role_first", "the first chunk has the role, and only that one")
async def role_first(server: Subject) -> None:
    first, *rest = (await streamed(server)).choices()
    first["delta"]["role"].equals("assistant")
    for choice in rest:
        choice["delta"].check(choice["delta"].value.get("role") is None, "without a role")


@CASES.add("chat.stream.role_empty", 'the chunk with the role has content ""', level="contract")
async def role_empty(server: Subject) -> None:
    first = (await streamed(server)).choices()[0]
    first["delta"].equals({"role": "assistant", "content": ""})


@CASES.add("chat.stream.finish", "finish_reason is null in all chunks but the last with a choice")
async def finish(server: Subject) -> None:
    *others, last = (await streamed(server)).choices()
    last["finish_reason"].is_in(("stop", "length"))
    for choice in others:
        choice["finish_reason"].equals(None)


@CASES.add("chat.stream.finish_with_content", "the last content chunk is the one with finish_reason", level="contract")
async def finish_with_content(server: Subject) -> None:
    choices = (await streamed(server, ignore_eos=True)).choices()
    choices[-1]["delta"]["content"].text()


@CASES.add("chat.stream.no_empty_chunks", "a token that brings no text brings no chunk", level="contract")
async def no_empty_chunks(server: Subject) -> None:
    _, *middle, _ = (await streamed(server, max_tokens=48, ignore_eos=True)).choices()
    for choice in middle:
        content = choice["delta"]["content"]
        content.check(bool(content.text()), "some text")


@CASES.add("chat.stream.usage", "with include_usage the last chunk has the usage and no choice")
async def usage(server: Subject) -> None:
    *chunks, last = (await streamed(server, **USAGE)).events()
    last["choices"].equals([])
    whole = await server.chat()
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        last["usage"][name].equals(whole["usage"][name].value)
    for chunk in chunks:
        chunk["choices"].items(1)


@CASES.add("chat.stream.usage_null", 'with include_usage all other chunks have "usage": null', level="contract")
async def usage_null(server: Subject) -> None:
    for event in (await streamed(server, **USAGE)).events()[:-1]:
        event["usage"].equals(None)


@CASES.add("chat.stream.no_usage", "without include_usage no chunk has a usage, and each has a choice")
async def no_usage(server: Subject) -> None:
    for options in (None, {"include_usage": False}):
        for event in (await streamed(server, stream_options=options)).events():
            event["choices"].items(1)
            event.check("usage" not in event or event["usage"].value is None, "without a usage")


@CASES.add("chat.stream.equals_nonstream", "the joined deltas are the text of the whole answer")
async def equals_nonstream(server: Subject) -> None:
    for content in (PROMPT, "ü😀 Bonjour", "Write three short lines."):
        whole = (await server.chat(content, max_tokens=32))["choices"][0]
        answer = await streamed(server, content, max_tokens=32)
        if answer.text() != whole["message"]["content"].value:
            answer.fail(repr(whole["message"]["content"].value), repr(answer.text()))


@CASES.add("chat.stream.finish_equals_nonstream", "finish_reason is that of the whole answer")
async def finish_equals_nonstream(server: Subject) -> None:
    whole = (await server.chat(max_tokens=3))["choices"][0]
    answer = await streamed(server, max_tokens=3)
    answer.choices()[-1]["finish_reason"].equals(whole["finish_reason"].value)


@CASES.add("chat.stream.cut_character", "a character cut off by the end becomes one U+FFFD", level="contract")
async def cut_character(server: Subject) -> None:
    first, *rest = await server.tokens(text=SPLIT)
    skip_unless(bool(rest), "the vocabulary has the character as one token")
    fields = {"max_tokens": 1, "logit_bias": {str(first): 100}}
    answer = await streamed(server, **fields)
    if answer.text() != "\N{REPLACEMENT CHARACTER}":
        answer.fail("the text \N{REPLACEMENT CHARACTER}", repr(answer.text()))


@CASES.add("chat.stream.http10", "HTTP/1.0 clients get the stream unchunked, then the end", level="contract")
async def http10(server: Subject) -> None:
    body = json.dumps(server.chat_body(stream=True)).encode()
    head = server.head(CHAT, f"Content-Length: {len(body)}", version="1.0")
    answer = (await server.raw(head + body, f"POST {CHAT} HTTP/1.0, a stream")).has_status(200)
    answer.header("transfer-encoding").equals(None)
    if answer.text() != (await streamed(server)).text():
        answer.fail("the text that HTTP/1.1 gets", repr(answer.text()))


@CASES.add("chat.stream.refused", "what is refused whole is refused as a stream, before it begins", level="contract")
async def refused(server: Subject) -> None:
    bad: list[Body] = [{"temperature": 3}, {"model": "no-such-model"}, {"max_tokens": 10**9}, {"messages": []}]
    for fields in bad:
        whole = await server.post(CHAT, server.chat_body(**fields))
        answer = await server.post(CHAT, server.chat_body(stream=True, **fields))
        answer.has_status(whole.status).document["error"].equals(whole.document["error"].value)
