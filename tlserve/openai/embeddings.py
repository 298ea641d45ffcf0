"""POST /v1/embeddings."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
import trio
from numpy.typing import NDArray

from tlserve.engine.request import GenRequest, PooledOut
from tlserve.errors import ContextLengthExceeded, InternalFault, Overloaded, UnsupportedParameter
from tlserve.http.messages import Note, Reply, Request, Response
from tlserve.http.trace import Trace
from tlserve.openai import prepare, schema
from tlserve.openai.body import shown
from tlserve.openai.parse import EmbeddingSpec, parse_embeddings
from tlserve.openai.service import Service, read_priority, refuse_kv_handle
from tlserve.openai.traces import Timeline, describe_embeddings

# Inputs of one request that are in the engine at once: enough to fill its steps, few enough that 2,048 of
# them neither fill the queue nor stand in front of everyone else's requests.
MAX_AT_ONCE = 16
RETRY_INTERVAL = 0.05  # seconds until a group that found the queue full tries again


async def embeddings(service: Service, request: Request, reply: Reply) -> None:
    refuse_kv_handle(request)
    priority = read_priority(request)
    with service.loop.hold_place():
        spec = await service.parse(parse_embeddings, request.body)
        service.check_model(spec.model)
        if spec.dimensions not in (None, service.hidden_size):
            raise UnsupportedParameter(
                f"dimensions must be {service.hidden_size}, which is what this model has, got {shown(spec.dimensions)}",
                param="dimensions",
            )
        requests = await service.off_loop(
            lambda: _pooling_requests(service, spec, priority), num_bytes=len(request.body)
        )
    num_tokens = sum(len(pooling.prompt) for pooling in requests)
    request.notes.update(prompt_tokens=num_tokens, finish="none")
    data: list[schema.Embedding] = []
    num_cached_tokens = 0
    size = max(1, min(MAX_AT_ONCE, service.queue_capacity // 4))
    began = trio.current_time()
    try:
        for start in range(0, len(requests), size):
            # Refusing a later group would throw away what was computed, and the whole would be sent again.
            for out in await _pool(service, requests[start : start + size], request.notes, may_wait=start > 0):
                data.append(schema.Embedding(index=len(data), embedding=_encoded(out.embedding, spec.encoding_format)))
                num_cached_tokens += out.num_cached_tokens
    finally:
        if request.trace is not None:
            _tell(request.trace, service, spec, request.notes, began)
    request.notes.update(cached_tokens=num_cached_tokens, finish="stop")
    usage = schema.Usage(
        prompt_tokens=num_tokens,
        total_tokens=num_tokens,
        prompt_tokens_details=schema.PromptTokensDetails(num_cached_tokens),
    )
    document = schema.EmbeddingList(data=data, model=service.model_id, usage=usage)
    await reply.send(Response(200, msgspec.json.encode(document)))


def _pooling_requests(service: Service, spec: EmbeddingSpec, priority: int) -> list[GenRequest]:
    """One request an input, in order. Raises InvalidRequest, ContextLengthExceeded."""
    requests = []
    for index, given in enumerate(spec.inputs):
        param = f"input[{index}]" if spec.is_list else "input"
        tokens = prepare.encode(service, given, param, parse_special=False)
        if len(tokens) > service.max_model_len:
            raise ContextLengthExceeded(
                f"{param} has {len(tokens)} tokens; this model's maximum context length is {service.max_model_len}",
                param=param,
            )
        requests.append(GenRequest(tuple(tokens), max_tokens=0, priority=priority, is_pooling=True))
    return requests


async def _pool(
    service: Service, requests: Sequence[GenRequest], notes: dict[str, Note], *, may_wait: bool
) -> list[PooledOut]:
    """The vectors of one group, in order. With ``may_wait`` a full queue is waited for, else it raises Overloaded."""
    while True:
        try:
            return await _pool_now(service, requests, notes)
        except Overloaded:
            if not may_wait:
                raise
        await trio.sleep(RETRY_INTERVAL)


async def _pool_now(service: Service, requests: Sequence[GenRequest], notes: dict[str, Note]) -> list[PooledOut]:
    outs: dict[int, PooledOut] = {}
    async with service.loop.submit(requests) as outputs:
        try:
            while len(outs) < len(requests):
                index, out = await anext(outputs)
                assert isinstance(out, PooledOut)
                outs[index] = out
        finally:
            notes.setdefault("queue_seconds", outputs.queue_time)  # of the first group
    return [outs[index] for index in range(len(requests))]


def _tell(trace: Trace, service: Service, spec: EmbeddingSpec, notes: Mapping[str, Note], began: float) -> None:
    describe_embeddings(trace, model=spec.model, encoding_format=spec.encoding_format, dimensions=service.hidden_size)
    if "queue_seconds" in notes:  # the engine has taken some of it in
        queue_time = notes["queue_seconds"]
        assert not isinstance(queue_time, str)
        Timeline(began, queue_time, None, trio.current_time() - began).add_to(trace)


def _encoded(embedding: NDArray[np.float32], encoding_format: str) -> msgspec.Raw:
    """Base64 is of the little-endian float32s; the decimal form gives the same values back.

    Raises InternalFault for values that are not finite: JSON has none such, and no index takes them.
    """
    if not np.isfinite(embedding).all():
        raise InternalFault("the model's hidden states are not finite")
    if encoding_format == "base64":
        return msgspec.Raw(msgspec.json.encode(base64.b64encode(embedding.astype("<f4").tobytes()).decode()))
    return msgspec.Raw(msgspec.json.encode(embedding.tolist()))
