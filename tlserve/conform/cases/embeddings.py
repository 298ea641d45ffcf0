"""POST /v1/embeddings."""

from __future__ import annotations

import base64
import math
import struct

from tlserve.conform.case import Cases, Failed
from tlserve.conform.found import Found, shown
from tlserve.conform.subject import Subject

CASES = Cases("api.md#embeddings", "core")
FEW_BITS = 1e-5  # of a vector whose length is 1


def _vector(item: Found) -> list[float]:
    return [value.number() for value in item["embedding"].items()]


def _unpacked(item: Found) -> list[float]:
    text = item["embedding"].text()
    try:
        data = base64.b64decode(text, validate=True)
        return [value for (value,) in struct.iter_unpack("<f", data)]
    except (ValueError, struct.error):
        raise Failed(sent=item.sent, expected="base64 of 4-byte floats", came=shown(text)) from None


@CASES.add("embeddings.shape", "the answer is a list with an embedding for each input, in their order")
async def shape(server: Subject) -> None:
    document = await server.embed(["first", "second, longer"])
    document["object"].equals("list")
    document["model"].text()
    for index, item in enumerate(document["data"].items(2)):
        item["object"].equals("embedding")
        item["index"].equals(index)
        _vector(item)


@CASES.add("embeddings.usage", "usage counts the tokens of all inputs")
async def usage(server: Subject) -> None:
    one, two = (await server.embed("first"))["usage"], (await server.embed(["first", "first"]))["usage"]
    two["prompt_tokens"].equals(2 * one["prompt_tokens"].integer(1))
    two["total_tokens"].equals(two["prompt_tokens"].value)


@CASES.add("embeddings.base64", "encoding_format base64 has the little-endian float32 of the same values")
async def in_base64(server: Subject) -> None:
    numbers = _vector((await server.embed("first", encoding_format="float"))["data"][0])
    packed = (await server.embed("first", encoding_format="base64"))["data"][0]
    wanted = [value for (value,) in struct.iter_unpack("<f", struct.pack(f"<{len(numbers)}f", *numbers))]
    packed.check(_unpacked(packed) == wanted, "the values of encoding_format float")


@CASES.add("embeddings.norm", "a vector has length 1", level="contract")
async def norm(server: Subject) -> None:
    item = (await server.embed("first"))["data"][0]
    length = math.hypot(*_vector(item))
    Found(length, "length of data[0].embedding", server.last_sent).check(abs(length - 1) < FEW_BITS, "1")


@CASES.add("embeddings.mates", "a vector depends on its own input alone", level="contract")
async def mates(server: Subject) -> None:
    alone = _vector((await server.embed("first"))["data"][0])
    items = (await server.embed(["second " * 40, "first", "third"]))["data"].items(3)
    items[1].check(_vector(items[1]) == alone, "the same values as alone")
    items[0].check(_vector(items[0]) != alone, "other values than those of another input")


@CASES.add("embeddings.ids", "token ids are an input, and so is a list of such lists", level="contract")
async def ids(server: Subject) -> None:
    ids = await server.tokens(text="first", add_special_tokens=True)
    wanted = _vector((await server.embed("first"))["data"][0])
    for given, count in ((ids, 1), ([ids, ids], 2)):
        for item in (await server.embed(given))["data"].items(count):
            item.check(_vector(item) == wanted, "the values of the text")


@CASES.add("embeddings.dimensions", "dimensions may be the model's own number", level="contract")
async def dimensions(server: Subject) -> None:
    size = len(_vector((await server.embed("first"))["data"][0]))
    (await server.embed("first", dimensions=size))["data"][0]["embedding"].items(size)
