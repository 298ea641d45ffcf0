"""POST /v1/tokenize and /v1/detokenize."""

from __future__ import annotations

from tlserve.conform.case import Cases
from tlserve.conform.subject import Subject

CASES = Cases("api.md#tokens")
TEXTS = ("", "Hello, world", "ü😀 漢字\n\ttab", "a" * 500)


@CASES.add("tokenize.shape", "/tokenize answers tokens, their count and max_model_len")
async def shape(server: Subject) -> None:
    answer = await server.post("/tokenize", {"text": "Hello, world", "model": server.model})
    document = answer.has_status(200).document
    document["count"].equals(len(document["tokens"].items()))
    document["max_model_len"].integer(1)
    for id in document["tokens"].items():
        id.integer()


@CASES.add("tokenize.inverse", "/detokenize is the inverse of /tokenize")
async def inverse(server: Subject) -> None:
    for text in TEXTS:
        tokens = await server.tokens(text=text)
        answer = await server.post("/detokenize", {"tokens": tokens, "model": server.model})
        answer.has_status(200).document["text"].equals(text)


@CASES.add("tokenize.messages", "messages are tokenized as the prompt that chat would render")
async def messages(server: Subject) -> None:
    tokens = await server.tokens(messages=[{"role": "user", "content": "Hello"}])
    answer = await server.post("/detokenize", {"tokens": tokens, "model": server.model})
    text = answer.has_status(200).document["text"]
    text.check("Hello" in text.text() and len(text.text()) >= len("Hello"), "the message, as the template has it")
    (await server.chat("Hello", max_tokens=1))["usage"]["prompt_tokens"].equals(len(tokens))


@CASES.add("tokenize.either", "exactly one of text and messages is given, else 400")
async def either(server: Subject) -> None:
    both = {"text": "a", "messages": [{"role": "user", "content": "a"}]}
    for fields in ({}, both):
        (await server.post("/tokenize", {**fields, "model": server.model})).refuses(400)


@CASES.add("detokenize.vocabulary", "an id outside the vocabulary is 400")
async def vocabulary(server: Subject) -> None:
    for id in (-1, 2**31, 2**64):
        (await server.post("/detokenize", {"tokens": [id], "model": server.model})).refuses(400)
