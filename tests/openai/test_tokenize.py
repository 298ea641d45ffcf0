"""/v1/tokenize and /v1/detokenize."""

from __future__ import annotations

from tests.openai.fakes import Api


async def test_tokenize_and_detokenize_are_inverse() -> None:
    api = Api()
    reply = await api.call("/v1/tokenize", {"model": "succ", "text": "aé"})
    assert reply.json == {"tokens": [97, 0xC3, 0xA9], "count": 3, "max_model_len": 64}
    reply = await api.call("/v1/detokenize", {"model": "succ", "tokens": [97, 0xC3, 0xA9]})
    assert reply.json == {"text": "aé"}
    reply = await api.call("/v1/detokenize", {"model": "succ", "tokens": [256]})
    assert (reply.status, reply.json["error"]["param"]) == (400, "tokens")


async def test_tokenize_counts_a_rendered_chat_and_text_past_the_context() -> None:
    api = Api(template="<{% for m in messages %}{{ m.role }}:{{ m.content }}{% endfor %}>")
    messages = [{"role": "developer", "content": "x"}]
    reply = await api.call("/v1/tokenize", {"model": "succ", "messages": messages})
    assert bytes(reply.json["tokens"]) == b"<system:x>"
    document = (await api.call("/v1/chat/completions", {"model": "succ", "messages": messages})).json
    assert document["usage"]["prompt_tokens"] == reply.json["count"]
    reply = await api.call("/v1/tokenize", {"model": "succ", "text": "a" * 100_000})
    assert reply.json["count"] == 100_000
