"""What servers get wrong: each lie breaks one rule, and is told by the cases that name the rule, and by no others."""

from __future__ import annotations

import base64
import json
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.conform.proxy import Exchange, Lie

CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"


@dataclass(frozen=True)
class Told:
    """A lie, the cases that must fail, and those that are tried, as patterns: what is near the rule."""

    lie: Lie
    caught_by: tuple[str, ...]
    tried: tuple[str, ...]


SAMPLING = ("chat.seed", "chat.top_*", "chat.min_*", "chat.*_penalty", "chat.temperature", "err.400", "err.422")
LIES: dict[str, Told] = {}


def told(name: str, *caught_by: str, tried: tuple[str, ...] = ()) -> Callable[[Callable[[Exchange], None]], None]:
    """Make a lie of a function that changes answers."""

    def register(tell: Callable[[Exchange], None]) -> None:
        LIES[name] = _told(Lie(tell=tell), caught_by, tried)

    return register


def asked(name: str, *caught_by: str, tried: tuple[str, ...] = ()) -> Callable[[Callable[[Exchange], None]], None]:
    """Make a lie of a function that changes requests."""

    def register(ask: Callable[[Exchange], None]) -> None:
        LIES[name] = _told(Lie(ask=ask), caught_by, tried)

    return register


def _told(lie: Lie, caught_by: tuple[str, ...], tried: tuple[str, ...] = ()) -> Told:
    """Without ``tried``, the areas of ``caught_by``."""
    return Told(lie, caught_by, tried or tuple(dict.fromkeys(map(_area, caught_by))))


def _area(case: str) -> str:
    return "chat.stream" if case.startswith("chat.stream.") else case.split(".")[0]


# Streams


@told("drops [DONE]", "chat.stream.done")
def _(exchange: Exchange) -> None:
    if exchange.path == CHAT:
        exchange.body = exchange.body.removesuffix(b"data: [DONE]\n\n")


@told("the role comes with every chunk", "chat.stream.role_first")
def _(exchange: Exchange) -> None:
    def change(chunk: Any) -> None:
        for choice in chunk["choices"]:
            choice["delta"]["role"] = "assistant"

    if exchange.path == CHAT and exchange.is_stream:
        exchange.change(change)


@told("the chunk with the role has no content", "chat.stream.role_empty")
def _(exchange: Exchange) -> None:
    exchange.body = exchange.body.replace(b'{"role":"assistant","content":""}', b'{"role":"assistant"}')


@told("finish_reason is empty in the middle of a stream", "chat.stream.finish")
def _(exchange: Exchange) -> None:
    if exchange.path == CHAT and exchange.is_stream:
        exchange.body = exchange.body.replace(b'"finish_reason":null', b'"finish_reason":""')


@told("a cut stream says that it is finished", "chat.stream.finish_equals_nonstream")
def _(exchange: Exchange) -> None:
    if exchange.path == CHAT and exchange.is_stream:
        exchange.body = exchange.body.replace(b'"finish_reason":"length"', b'"finish_reason":"stop"')


@told("the usage chunk is missing", "chat.stream.usage")
def _(exchange: Exchange) -> None:
    if exchange.path == CHAT:
        exchange.body = re.sub(rb'data: [^\n]*"choices":\[\][^\n]*\n\n', b"", exchange.body)


@told("the last chunk has a usage that nobody asked for", "chat.stream.no_usage")
def _(exchange: Exchange) -> None:
    def change(chunk: Any) -> None:
        chunk.setdefault("usage", {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2})

    if exchange.path == CHAT and exchange.is_stream:
        exchange.change(change)


@told("no usage is null while others have one", "chat.stream.usage_null")
def _(exchange: Exchange) -> None:
    if exchange.is_stream:
        exchange.body = exchange.body.replace(b',"usage":null', b"")


@told("a stream is text/plain", "chat.stream.content_type")
def _(exchange: Exchange) -> None:
    if exchange.is_stream:
        exchange.set_header("content-type", "text/plain; charset=utf-8")


@told("a stream may be cached", "chat.stream.headers")
def _(exchange: Exchange) -> None:
    exchange.set_header("cache-control", None)


@told("no space after data:", "chat.stream.framing")
def _(exchange: Exchange) -> None:
    if exchange.is_stream:
        exchange.body = exchange.body.replace(b"data: ", b"data:")


@told("each chunk has a time of its own", "chat.stream.one_id")
def _(exchange: Exchange) -> None:
    numbers = iter(range(10_000))
    if exchange.is_stream and exchange.path == CHAT:
        exchange.change(lambda chunk: chunk.update(created=next(numbers)))


@told("a chunk without text for every one with text", "chat.stream.no_empty_chunks")
def _(exchange: Exchange) -> None:
    """Only in streams without log-probabilities, whose entries would double."""
    if exchange.is_stream and exchange.path == CHAT and not exchange.asked.get("logprobs"):
        frames = exchange.body.split(b"\n\n")
        empty = re.sub(rb'"content":"(\\.|[^"\\])*"', b'"content":""', frames[1])
        exchange.body = b"\n\n".join([*frames[:2], empty, *frames[2:]])


@told(
    "streams lose broken characters",
    "chat.stream.equals_nonstream",
    "chat.stream.cut_character",
    "chat.stream.no_empty_chunks",
    "chat.stop.held_back",
    "chat.stop.stream",
    tried=("chat.stream", "chat.stop"),
)
def _(exchange: Exchange) -> None:
    if exchange.is_stream and not exchange.asked.get("logprobs"):
        exchange.body = exchange.body.replace("\N{REPLACEMENT CHARACTER}".encode(), b"")


# Whole answers


@told("the sum of tokens is one too many", "chat.usage")
def _(exchange: Exchange) -> None:
    def change(document: Any) -> None:
        if document.get("usage"):
            document["usage"]["total_tokens"] += 1

    if exchange.path == CHAT and exchange.status == 200:
        exchange.change(change)


@told("an answer is cut and says that it is finished", "chat.finish.length")
def _(exchange: Exchange) -> None:
    if exchange.asked.get("max_tokens") == 2:
        exchange.body = exchange.body.replace(b'"finish_reason":"length"', b'"finish_reason":"stop"')


@told("every answer has the same id", "chat.id")
def _(exchange: Exchange) -> None:
    if exchange.path == CHAT and not exchange.is_stream:
        exchange.body = re.sub(rb'"id":"chatcmpl-[0-9a-f]+"', b'"id":"chatcmpl-1"', exchange.body)


@told("cached_tokens is left out", "chat.usage.cached")
def _(exchange: Exchange) -> None:
    exchange.body = exchange.body.replace(b'"cached_tokens"', b'"c"')


@told("the stop string is part of the answer", "chat.stop", "chat.stop.earliest")
def _(exchange: Exchange) -> None:
    stop = exchange.asked.get("stop")
    if exchange.path != CHAT or exchange.is_stream or not stop or exchange.status != 200:
        return

    def change(document: Any) -> None:
        choice = document["choices"][0]
        if choice["finish_reason"] == "stop":
            choice["message"]["content"] += stop if isinstance(stop, str) else stop[0]

    exchange.change(change)


@told("all choices have index 0", "completions.prompts")
def _(exchange: Exchange) -> None:
    if exchange.path == COMPLETIONS and not exchange.is_stream:
        exchange.body = re.sub(rb'"index":\d+', b'"index":0', exchange.body)


@told("tokens beyond what was asked for are certain", "chat.logprobs", "chat.logprobs.greedy", "chat.logprobs.stream")
def _(exchange: Exchange) -> None:
    def change(document: Any) -> None:
        for entry in (document["choices"][0]["logprobs"] or {}).get("content", ()):
            entry["logprob"] = 0.5

    if exchange.path == CHAT and exchange.status == 200 and not exchange.is_stream:
        exchange.change(change)


@told("models have no owner", "models.list")
def _(exchange: Exchange) -> None:
    if exchange.path == "/v1/models":
        exchange.body = exchange.body.replace(b"owned_by", b"owner")


@told("embeddings in base64 are big-endian", "embeddings.base64")
def _(exchange: Exchange) -> None:
    def change(document: Any) -> None:
        for item in document["data"]:
            data = base64.b64decode(item["embedding"])
            values = struct.unpack(f"<{len(data) // 4}f", data)
            item["embedding"] = base64.b64encode(struct.pack(f">{len(values)}f", *values)).decode()

    if exchange.path == EMBEDDINGS and exchange.asked.get("encoding_format") == "base64":
        exchange.change(change)


@told("embeddings come in another order", "embeddings.shape")
def _(exchange: Exchange) -> None:
    if exchange.path == EMBEDDINGS and exchange.status == 200:
        exchange.change(lambda document: document["data"].sort(key=lambda item: -item["index"]))


@told("spellings of control tokens in a message become control tokens", "chat.special_tokens")
def _(exchange: Exchange) -> None:
    messages = exchange.asked.get("messages")
    if exchange.path == "/v1/tokenize" and messages and "<|im_end|>" in messages[0]["content"]:
        exchange.change(lambda document: document.update(tokens=document["tokens"][len("<|im_end|>") - 1 :]))


@told("a cached prefix changes the last bit", "exact.repeated", "exact.longer_prefix")
def _(exchange: Exchange) -> None:
    def change(document: Any) -> None:
        if document["usage"]["prompt_tokens_details"]["cached_tokens"] > 200:
            document["choices"][0]["logprobs"]["content"][-1]["logprob"] *= 1 + 2**-52

    if exchange.path == CHAT and exchange.asked.get("logprobs"):
        exchange.change(change)


# Errors


@told("errors have a fifth key", "err.exact")
def _(exchange: Exchange) -> None:
    if exchange.status >= 400:
        exchange.change(lambda document: document["error"].update(status=exchange.status))


@told("errors are called BadRequestError", "err.type")
def _(exchange: Exchange) -> None:
    if exchange.status == 400:
        exchange.body = exchange.body.replace(b"invalid_request_error", b"BadRequestError")


@told("errors do not say which value was wrong", "err.message")
def _(exchange: Exchange) -> None:
    exchange.body = exchange.body.replace(b"3.25", b"this")


@told("405 comes without Allow", "err.405")
def _(exchange: Exchange) -> None:
    exchange.set_header("allow", None)


@told("401 comes without WWW-Authenticate", "err.401")
def _(exchange: Exchange) -> None:
    exchange.set_header("www-authenticate", None)


@told("a full queue is 503", "err.429")
def _(exchange: Exchange) -> None:
    if exchange.status == 429:
        exchange.status = 503


@told("errors are text/html", "err.shape", "err.exact")
def _(exchange: Exchange) -> None:
    if exchange.status >= 400:
        exchange.set_header("content-type", "text/html")


# Fields that are parsed and ignored, or not checked


def _dropped(exchange: Exchange, name: str) -> None:
    fields = exchange.asked
    if exchange.path == CHAT and name in fields:
        del fields[name]
        exchange.sent = json.dumps(fields).encode()


def _ignores(name: str, *caught_by: str) -> None:
    LIES[f"ignores {name}"] = _told(Lie(ask=lambda exchange: _dropped(exchange, name)), caught_by, SAMPLING)


_ignores("n", "err.422.n", "err.400.n")
_ignores("top_k", "chat.top_k", "err.400.top_k")
_ignores("min_p", "chat.min_p", "err.400.min_p")
_ignores("top_p", "chat.top_p", "err.400.top_p")
_ignores("seed", "chat.seed", "chat.top_k", "chat.top_p", "chat.min_p", "err.400.seed")
_ignores("presence_penalty", "chat.presence_penalty", "err.400.presence_penalty")
_ignores("response_format", "err.422.response_format")
_ignores("tools", "err.422.tools")


@asked("a negative temperature is taken as 0", "err.400.temperature")
def _(exchange: Exchange) -> None:
    if exchange.asked.get("temperature") == -1:
        exchange.sent = json.dumps(exchange.asked | {"temperature": 0}).encode()


@asked("NaN is read as null", "json.nan")
def _(exchange: Exchange) -> None:
    exchange.sent = re.sub(rb": (NaN|-?Infinity|1e999)", b": null", exchange.sent)


@asked("what follows a document is not looked at", "json.invalid")
def _(exchange: Exchange) -> None:
    if exchange.sent.startswith(b"{") and exchange.sent.endswith(b"}}"):
        try:
            json.loads(exchange.sent)
        except ValueError:
            exchange.sent = exchange.sent[:-1]


@asked("of two equal keys the first wins", "json.duplicate_keys")
def _(exchange: Exchange) -> None:
    exchange.sent = exchange.sent.replace(b'"max_tokens": 3, "ignore_eos": true, "max_tokens": 4', b'"max_tokens": 3')


@asked("completions are 32 tokens by default", "completions.default_length")
def _(exchange: Exchange) -> None:
    if exchange.path == COMPLETIONS and exchange.asked.get("max_tokens", 0) is None:
        exchange.sent = json.dumps(exchange.asked | {"max_tokens": 32}).encode()


@asked("developer is taken as user", "chat.developer")
def _(exchange: Exchange) -> None:
    exchange.sent = exchange.sent.replace(b'"role": "developer"', b'"role": "user"')


@asked("any priority is taken", "http.priority")
def _(exchange: Exchange) -> None:
    exchange.headers = [pair for pair in exchange.headers if pair[0] != "x-tl-priority"]


@asked("a KV handle is ignored", "http.kv_handle")
def _(exchange: Exchange) -> None:
    exchange.headers = [pair for pair in exchange.headers if pair[0] != "x-tl-kv-handle"]


# The health port, and clients that leave


@told("not ready while serving", "health.ready")
def _(exchange: Exchange) -> None:
    if exchange.path == "/readyz":
        exchange.status = 503


@told("a gauge is missing", "metrics.gauges")
def _(exchange: Exchange) -> None:
    exchange.body = exchange.body.replace(b"tl_engine_batch_tokens", b"tl_engine_batch")


@told("the hit ratio is in percent", "metrics.hit_ratio")
def _(exchange: Exchange) -> None:
    exchange.body = re.sub(rb"(\ntl_engine_prefix_cache_hit_ratio) .*", rb"\1 42.0", exchange.body)


@told("a used block is lost", "metrics.idle")
def _(exchange: Exchange) -> None:
    exchange.body = re.sub(rb'(\ntl_engine_kv_blocks{state="used"}) 0.0', rb"\1 1.0", exchange.body)


LIES["streams go on when their clients leave"] = _told(
    Lie(outlives=lambda exchange: exchange.path == CHAT and bool(exchange.asked.get("stream"))),
    ("cancel.disconnect",),
)
LIES["whole answers go on when their clients leave"] = _told(
    Lie(outlives=lambda exchange: exchange.path == CHAT and not exchange.asked.get("stream")),
    ("cancel.nonstream", "cancel.prefill"),
)
LIES["no request id"] = _told(
    Lie(raw=lambda data: data.replace(b"X-Request-Id: ", b"X-Request: ")),
    ("http.request_id.echoed", "http.request_id.fresh", "http.request_id.everywhere"),
)
LIES["request ids of clients are not given back"] = _told(
    Lie(raw=lambda data: re.sub(rb"X-Request-Id: (a|Az09._:-|x{128}|conform-1)\r", rb"X-Request-Id: own\r", data)),
    ("http.request_id.echoed", "http.request_id.everywhere"),
)
