"""The requests whose answers are known, and what of an answer must be the same every time.

An answer is compared without its id, its time, and how much of its prompt was found in the cache: everything else is
the same bits for the same request whatever else the server does, streamed or not.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tests.client import DONE

CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
TOKENIZE, DETOKENIZE = "/v1/tokenize", "/v1/detokenize"
TOPICS = ("a lighthouse", "the tides", "old maps", "a slow train", "bread", "the colour of rust")


@dataclass(frozen=True)
class Case:
    path: str
    body: dict[str, Any]

    @property
    def is_generation(self) -> bool:
        return self.path in (CHAT, COMPLETIONS)

    def raw(self, **fields: Any) -> bytes:
        return json.dumps(self.body | fields).encode()


def cases(model: str, *, max_tokens: int = 24) -> list[Case]:
    """Greedy and seeded, short and long prompts, alone and in lists, with everything that shapes an answer."""
    generations: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0, "logprobs": True, "top_logprobs": 3},
        {"temperature": 1, "seed": 1},
        {"temperature": 1.3, "seed": 2, "top_k": 40, "top_p": 0.9, "logprobs": True},
        {"temperature": 0.8, "seed": 3, "min_p": 0.05, "repetition_penalty": 1.2, "ignore_eos": True},
        {"temperature": 0.7, "seed": 4, "presence_penalty": 0.5, "frequency_penalty": 0.5, "stop": ["e", "the"]},
    ]
    found = []
    for number, fields in enumerate(generations):
        topic = TOPICS[number]
        content = f"Say something about {topic}." + f" Mind {topic}." * (40 * (number % 2))
        messages = [{"role": "user", "content": content}]
        found.append(Case(CHAT, {"model": model, "messages": messages, "max_tokens": max_tokens, **fields}))
        plain = {key: value for key, value in fields.items() if key not in ("logprobs", "top_logprobs")}
        prompt: Any = content if number % 3 else [content, f"About {topic}: "]
        found.append(Case(COMPLETIONS, {"model": model, "prompt": prompt, "max_tokens": max_tokens, **plain}))
    text = "The keeper wrote: “niño, 灯台, 🗼” and no more."
    return [
        *found,
        Case(EMBEDDINGS, {"model": model, "input": [text, *TOPICS], "encoding_format": "base64"}),
        Case(EMBEDDINGS, {"model": model, "input": text * 4}),
        Case(TOKENIZE, {"model": model, "text": text * 8}),
        Case(TOKENIZE, {"model": model, "messages": [{"role": "user", "content": text}]}),
        Case(DETOKENIZE, {"model": model, "tokens": [72, 105, 33]}),
    ]


def of_document(case: Case, document: dict[str, Any]) -> Any:
    """What must be the same of a plain answer."""
    if not case.is_generation:
        return {key: value for key, value in document.items() if key != "usage"}
    found: dict[str, Any] = {"usage": _usage(document["usage"])}
    for choice in document["choices"]:
        text = choice["message"]["content"] if "message" in choice else choice["text"]
        found[str(choice["index"])] = [text, choice["finish_reason"], choice["logprobs"]]
    return found


def of_events(case: Case, events: Sequence[Any]) -> Any:
    """The same of a streamed answer, which asked for its usage. Raises ValueError for a stream that is not whole."""
    if not events or events[-1] != DONE or any("error" in event for event in events[:-1]):
        raise ValueError(f"not a whole stream: it ends with {json.dumps(events[-1:])[:500]}")
    *chunks, usage = events[:-1]
    found: dict[str, Any] = {"usage": _usage(usage["usage"])}
    for chunk in chunks:
        for choice in chunk["choices"]:
            known = found.setdefault(str(choice["index"]), ["", None, None])
            known[0] += choice["delta"]["content"] if "delta" in choice else choice["text"]
            known[1] = choice["finish_reason"]
            known[2] = _joined(known[2], choice["logprobs"])
    return found


def _joined(known: dict[str, Any] | None, more: dict[str, Any] | None) -> dict[str, Any] | None:
    if known is None or more is None:
        return known or more
    return {key: known[key] + value if isinstance(value, list) else value for key, value in more.items()}


def _usage(usage: dict[str, Any]) -> list[int]:
    return [usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]]
