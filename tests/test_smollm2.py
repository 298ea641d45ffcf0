"""The real model: its recorded answers, and the same answers whatever else runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import trio

from tests.client import DONE, post, stream_events
from tests.model.smollm2 import SMOLLM2, needs_smollm2
from tlserve import ServeConfig, serve

RECORDED = json.loads((Path(__file__).parents[1] / "fixtures" / "smollm2_greedy.json").read_text())
MODEL = "SmolLM2-135M-Instruct.Q4_1"
NUM_TOKENS = 16
pytestmark = needs_smollm2


async def test_greedy_answers_are_those_of_a_float32_reference() -> None:
    """weights = "f32" is the reference path: token by token what transformers gives for the dequantised weights."""
    config = ServeConfig.for_model(SMOLLM2, weights="f32", kv_dtype="f32", max_model_len=512)
    async with serve(config) as server:
        for case in RECORDED:
            body = {
                "model": MODEL,
                "prompt": case["prompt_ids"],
                "max_tokens": NUM_TOKENS,
                "temperature": 0,
                "ignore_eos": True,
                "logprobs": 0,
            }
            choice = (await post(server.http_addr, "/v1/completions", body)).json()["choices"][0]
            spelled = await post(
                server.http_addr, "/v1/detokenize", {"model": MODEL, "tokens": case["tokens"][:NUM_TOKENS]}
            )
            assert "".join(choice["logprobs"]["tokens"]) == spelled.json()["text"]


async def test_chats_are_sensible_english_and_rendered_as_recorded() -> None:
    async with serve(ServeConfig.for_model(SMOLLM2, weights="f32", kv_dtype="f32", max_model_len=512)) as server:
        for case in RECORDED:
            messages = [{"role": "user", "content": case["prompt"]}]
            tokens = await post(server.http_addr, "/v1/tokenize", {"model": MODEL, "messages": messages})
            assert tokens.json()["tokens"] == case["prompt_ids"]
        body = {"model": MODEL, "messages": messages, "temperature": 0, "max_tokens": 40}
        answer = (await post(server.http_addr, "/v1/chat/completions", body)).json()["choices"][0]["message"]["content"]
    assert answer.startswith("The rainbow is a beautiful sight")


async def test_sixteen_streams_at_once_are_the_sixteen_answers_one_by_one() -> None:
    """Quantised weights, half greedy and half seeded, prompts of many lengths; every byte is the same."""
    bodies: list[dict[str, Any]] = [
        {
            "model": MODEL,
            "messages": [{"role": "user", "content": f"Write {number} words about the sea. " * (1 + number % 5)}],
            "max_tokens": 24 + number,
            "temperature": number % 2,
            "seed": number,
            "logprobs": True,
        }
        for number in range(16)
    ]

    async def answer(body: dict[str, Any]) -> list[Any]:
        events = await stream_events(server.http_addr, "/v1/chat/completions", body)
        return [event if event == DONE else event["choices"] for event in events]

    async def keep(place: int) -> None:
        together[place] = await answer(bodies[place])

    together: list[Any] = [None] * len(bodies)
    async with serve(ServeConfig.for_model(SMOLLM2, max_model_len=1024)) as server:
        async with trio.open_nursery() as nursery:
            for place in range(len(bodies)):
                nursery.start_soon(keep, place)
        for place, body in enumerate(bodies):
            assert await answer(body) == together[place]
