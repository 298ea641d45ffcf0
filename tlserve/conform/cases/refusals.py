"""Bad and unserved values, field by field: status, and the field that the error names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tlserve.conform.case import Cases, Check
from tlserve.conform.subject import CHAT, COMPLETIONS, EMBEDDINGS, Body, Subject

CASES = Cases("api.md#generation")


@dataclass(frozen=True, slots=True)
class Wrong:
    """Values that one field may not have; ``param`` is what the error names, the field unless given."""

    path: str
    field: str
    values: tuple[Any, ...]
    param: str | None = None
    others: tuple[tuple[str, Any], ...] = ()  # fields that must be there too

    def bodies(self, server: Subject) -> list[Body]:
        """Each value, and for what can be streamed in a stream too."""
        can_stream = self.path != EMBEDDINGS and not self.field.startswith("stream")
        streams: tuple[Body, ...] = ({}, {"stream": True}) if can_stream else ({},)
        return [
            self._base(server, {self.field: value} | dict(self.others)) | stream
            for value in self.values
            for stream in streams
        ]

    def _base(self, server: Subject, fields: Body) -> Body:
        if self.path == CHAT:
            return server.chat_body(**fields)
        if self.path == COMPLETIONS:
            return server.text_body(**fields)
        return {"input": "a", "model": server.model} | fields


def _turn(**fields: Any) -> list[Body]:
    return [{"role": "user", "content": "a"} | fields]


# What is wrong whoever asks: 400.
BAD = (
    Wrong(CHAT, "temperature", (-1, 2.5, "1", [])),
    Wrong(CHAT, "top_p", (0, 1.1, "1")),
    Wrong(CHAT, "top_k", (-2, 0.5, "1")),
    Wrong(CHAT, "min_p", (-0.1, 1.1)),
    Wrong(CHAT, "repetition_penalty", (0, -1)),
    Wrong(CHAT, "presence_penalty", (-2.1, 2.1)),
    Wrong(CHAT, "frequency_penalty", (-2.1, 2.1)),
    Wrong(CHAT, "max_tokens", (0, -1, "3", 1.5)),
    Wrong(CHAT, "max_completion_tokens", (0, -1)),
    Wrong(CHAT, "seed", (2**63, -(2**63) - 1, 0.5, "1")),
    Wrong(CHAT, "n", (0, -1)),
    Wrong(CHAT, "stream", ("yes",)),
    Wrong(CHAT, "stream_options", ({"include_usage": True}, {})),
    Wrong(CHAT, "logprobs", ("yes", 5)),
    Wrong(CHAT, "top_logprobs", (-1, 21), others=(("logprobs", True),)),
    Wrong(CHAT, "messages", ([], "a", {})),
    Wrong(COMPLETIONS, "prompt", ("", [])),
    Wrong(COMPLETIONS, "logprobs", (-1, 6)),
    Wrong(EMBEDDINGS, "input", ("", [])),
    Wrong(EMBEDDINGS, "encoding_format", ("int8",)),
)
# The same where the error names a place inside the field, or the rule needs words of its own.
BAD_PLACES = (
    (
        "err.400.role",
        "an unknown role is 400 and named by its place",
        Wrong(CHAT, "messages", (_turn(role="robot"), _turn(role="")), "messages[0].role"),
    ),
    (
        "err.400.content",
        "a user's content may not be null",
        Wrong(CHAT, "messages", (_turn(content=None),), "messages[0].content"),
    ),
    ("err.400.stop", "a stop list has up to 4 strings", Wrong(CHAT, "stop", (["a", "b", "c", "d", "e"], 5), "stop")),
    ("err.400.stop_empty", "an empty stop string is 400", Wrong(CHAT, "stop", ("",), "stop")),
    (
        "err.400.logit_bias",
        "a bias is from -100 to 100, for an id of the vocabulary",
        Wrong(CHAT, "logit_bias", ({"5": 101}, {"5": "1"}, {"x": 1}, {"-1": 1}, {"999999999": 1})),
    ),
    ("err.400.stop_token_ids", "stop tokens are ids of the vocabulary", Wrong(CHAT, "stop_token_ids", ([10**9], [-1]))),
    (
        "err.400.top_logprobs_alone",
        "top_logprobs without logprobs is 400",
        Wrong(CHAT, "top_logprobs", (2,), "top_logprobs"),
    ),
    ("err.400.min_tokens", "min_tokens above max_tokens is 400", Wrong(CHAT, "min_tokens", (17,), "min_tokens")),
    ("err.400.prompt_ids", "prompt ids outside the vocabulary are 400", Wrong(COMPLETIONS, "prompt", ([10**9], [-1]))),
    (
        "err.400.prompts",
        "more than 64 prompts are 400, and so is an empty one among them",
        Wrong(COMPLETIONS, "prompt", (["a"] * 65, ["a", ""])),
    ),
    (
        "err.400.inputs",
        "more than 2,048 inputs are 400, and so is an empty one among them",
        Wrong(EMBEDDINGS, "input", (["a"] * 2049, ["a", ""])),
    ),
)
# What is right, and not served here: 422.
UNSERVED = (
    Wrong(CHAT, "n", (2,)),
    Wrong(COMPLETIONS, "n", (2,)),
    Wrong(CHAT, "tools", ([{"type": "function", "function": {"name": "f"}}],)),
    Wrong(CHAT, "tool_choice", ("required",)),
    Wrong(CHAT, "response_format", ({"type": "json_object"},)),
    Wrong(CHAT, "messages", (_turn(content=[{"type": "text", "text": "a"}]),), "messages[0].content"),
    Wrong(COMPLETIONS, "echo", (True,)),
    Wrong(COMPLETIONS, "best_of", (2,)),
    Wrong(COMPLETIONS, "suffix", ("end",)),
    Wrong(EMBEDDINGS, "dimensions", (1,)),
)


def _refused(wrong: Wrong, status: int, param: str | None, code: str | None = None) -> Check:
    async def check(server: Subject) -> None:
        for body in wrong.bodies(server):
            (await server.post(wrong.path, body)).refuses(status, param=param, code=code)

    return check


def _area(wrong: Wrong) -> str:
    """Part of an id: the field, after the route where it is not chat's."""
    name = "content_parts" if wrong.param == "messages[0].content" else wrong.field
    return name if wrong.path == CHAT else f"{wrong.path.removeprefix('/')}.{name}"


def _register() -> None:
    for wrong in BAD:
        rule = f"a value of {wrong.field} that breaks its rule is 400 and named, also for a stream"
        CASES.add(f"err.400.{_area(wrong)}", rule)(_refused(wrong, 400, wrong.field))
    for id, rule, wrong in BAD_PLACES:
        CASES.add(id, rule)(_refused(wrong, 400, wrong.param))
    for wrong in UNSERVED:
        rule = f"a value of {wrong.field} that is not served is 422 and named, never ignored"
        check = _refused(wrong, 422, wrong.param or wrong.field, "unsupported_parameter")
        CASES.add(f"err.422.{_area(wrong)}", rule)(check)


_register()
