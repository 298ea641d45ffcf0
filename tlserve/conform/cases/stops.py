"""Stop strings, stop tokens, and how long an answer must be.

Stop strings are cut out of what the model says when nothing stops it, so that any model has some.
"""

from __future__ import annotations

from tlserve.conform.case import Cases, Skipped
from tlserve.conform.found import Found
from tlserve.conform.subject import CHAT, PROMPT, Subject

CASES = Cases("api.md#stop-strings", "core")
NUM_TOKENS = 48


async def _unstopped(server: Subject) -> tuple[str, str]:
    """What the model says, and a stop string in it."""
    text = (await server.chat(max_tokens=NUM_TOKENS))["choices"][0]["message"]["content"].text()
    return text, _pair_in(text)


def _pair_in(text: str) -> str:
    """Two whole characters of it that are not at its start. Raises Skipped where there are none."""
    for start in range(2, len(text) - 1):
        pair = text[start : start + 2]
        if "\N{REPLACEMENT CHARACTER}" not in pair and text.find(pair) >= 2:
            return pair
    raise Skipped(f"the model says nothing that could be stopped: {text!r}")


def _ends(choice: Found, text: str, reason: str) -> None:
    message = choice["message"]["content"] if "message" in choice else choice["text"]
    message.equals(text)
    choice["finish_reason"].equals(reason)


@CASES.add("chat.stop", "the answer ends before a stop string, with finish_reason stop")
async def stop(server: Subject) -> None:
    text, pair = await _unstopped(server)
    for given in (pair, [pair], [pair, "\N{SNOWMAN}\N{SNOWMAN}"]):
        document = await server.chat(max_tokens=NUM_TOKENS, stop=given)
        _ends(document["choices"][0], text.split(pair)[0], "stop")


@CASES.add("chat.stop.stream", "a stream never sends a stop string, nor a part of one")
async def stop_in_stream(server: Subject) -> None:
    text, pair = await _unstopped(server)
    answer = await server.stream(CHAT, server.chat_body(max_tokens=NUM_TOKENS, stop=pair))
    if answer.text() != text.split(pair)[0]:
        answer.fail(repr(text.split(pair)[0]), repr(answer.text()))
    answer.choices()[-1]["finish_reason"].equals("stop")


@CASES.add("chat.stop.held_back", "text held back for a stop string is sent when none comes", level="contract")
async def stop_held_back(server: Subject) -> None:
    text, pair = await _unstopped(server)
    prefixes = [pair[0] + "\N{SNOWMAN}", pair[1] + "\N{SNOWMAN}", text[-1] + "\N{SNOWMAN}"]
    answer = await server.stream(CHAT, server.chat_body(max_tokens=NUM_TOKENS, stop=prefixes))
    if answer.text() != text:
        answer.fail(repr(text), repr(answer.text()))


@CASES.add("chat.stop.earliest", "of several stop strings the earliest in the text wins", level="contract")
async def stop_earliest(server: Subject) -> None:
    text, pair = await _unstopped(server)
    before = text.split(pair)[0]
    longer = before[-1] + pair
    document = await server.chat(max_tokens=NUM_TOKENS, stop=[pair, longer])
    _ends(document["choices"][0], text.split(longer)[0], "stop")


@CASES.add("chat.stop.last_token", "a stop string completed by the last allowed token is stop", level="contract")
async def stop_at_last_token(server: Subject) -> None:
    _, pair = await _unstopped(server)
    document = await server.chat(max_tokens=NUM_TOKENS, stop=pair)
    used = document["usage"]["completion_tokens"].integer(1)
    again = await server.chat(max_tokens=used, stop=pair)
    again["choices"][0]["finish_reason"].equals("stop")


@CASES.add("chat.stop.none", "stop null and [] are none", level="contract")
async def stop_none(server: Subject) -> None:
    text = (await server.chat())["choices"][0]["message"]["content"].text()
    nothing: tuple[object, ...] = (None, [])
    for given in nothing:
        (await server.chat(stop=given))["choices"][0]["message"]["content"].equals(text)


@CASES.add("chat.stop.not_in_prompt", "stop strings match generated text, never the prompt", level="contract")
async def stop_not_in_prompt(server: Subject) -> None:
    document = await server.chat(stop="twenty.", max_tokens=1, ignore_eos=True)
    document["choices"][0]["finish_reason"].equals("length")
    document["usage"]["completion_tokens"].equals(1)


@CASES.add("completions.stop", "completions end before a stop string too")
async def stop_of_completions(server: Subject) -> None:
    text = (await server.complete(max_tokens=NUM_TOKENS))["choices"][0]["text"].text()
    pair = _pair_in(text)
    document = await server.complete(max_tokens=NUM_TOKENS, stop=pair)
    _ends(document["choices"][0], text.split(pair)[0], "stop")


@CASES.add("chat.stop_token_ids", "a stop token ends the answer and is not in its text", level="contract")
async def stop_token_ids(server: Subject) -> None:
    (letter,) = await server.tokens(text="a")
    forced = {"logit_bias": {str(letter): 100}, "stop_token_ids": [letter]}
    document = await server.chat(**forced)
    _ends(document["choices"][0], "", "stop")
    document["usage"]["completion_tokens"].equals(1)


@CASES.add("chat.ignore_eos", "with ignore_eos an answer has exactly max_tokens", level="contract")
async def ignore_eos(server: Subject) -> None:
    document = await server.chat("Say yes.", max_tokens=96, ignore_eos=True)
    document["usage"]["completion_tokens"].equals(96)
    document["choices"][0]["finish_reason"].equals("length")


@CASES.add("chat.min_tokens", "before min_tokens no stop token is drawn", level="contract")
async def min_tokens(server: Subject) -> None:
    (letter,) = await server.tokens(text="a")
    forced = {"logit_bias": {str(letter): 100}, "stop_token_ids": [letter], "ignore_eos": True}
    document = await server.chat(PROMPT, min_tokens=5, **forced)
    document["usage"]["completion_tokens"].equals(6)
    document["choices"][0]["finish_reason"].equals("stop")
