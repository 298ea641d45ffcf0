"""POST /v1/tokenize and /v1/detokenize."""

from __future__ import annotations

import msgspec

from tlserve.http.messages import Reply, Request, Response
from tlserve.openai import prepare, schema
from tlserve.openai.parse import TokenizeSpec, parse_detokenize, parse_tokenize
from tlserve.openai.service import Service


async def tokenize(service: Service, request: Request, reply: Reply) -> None:
    spec = await service.parse(parse_tokenize, request.body)
    service.check_model(spec.model)
    tokens = await service.off_loop(
        lambda: _encode(service, spec), num_bytes=len(request.body), may_inline=spec.messages is None
    )
    document = schema.TokenizeResponse(tokens, len(tokens), service.max_model_len)
    await reply.send(Response(200, msgspec.json.encode(document)))


async def detokenize(service: Service, request: Request, reply: Reply) -> None:
    spec = await service.parse(parse_detokenize, request.body)
    service.check_model(spec.model)
    prepare.check_ids(service, spec.tokens, "tokens")
    text = await service.off_loop(lambda: service.tokenizer.decode(spec.tokens), num_bytes=len(request.body))
    await reply.send(Response(200, msgspec.json.encode(schema.DetokenizeResponse(text))))


def _encode(service: Service, spec: TokenizeSpec) -> list[int]:
    if spec.messages is not None:
        return prepare.encode_chat(service, spec.messages, limit=None)
    assert spec.text is not None
    return service.tokenizer.encode(spec.text, add_special_tokens=spec.add_special_tokens, parse_special=True)
