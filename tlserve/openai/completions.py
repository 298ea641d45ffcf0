"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import UNSET

from tlserve.http.messages import Reply, Request
from tlserve.openai import prepare, schema
from tlserve.openai.answer import Answer, Head, Whole
from tlserve.openai.choice import Piece, TokenAt
from tlserve.openai.logprobs import completion_logprobs
from tlserve.openai.parse import parse_completion
from tlserve.openai.service import Service, read_priority, refuse_kv_handle
from tlserve.text.tokenizer import Tokenizer


async def completions(service: Service, request: Request, reply: Reply) -> None:
    refuse_kv_handle(request)
    priority = read_priority(request)
    with service.loop.hold_place():
        spec = await service.parse(parse_completion, request.body)
        service.check_model(spec.gen.model)
        requests = await service.off_loop(
            lambda: prepare.completion_requests(service, spec, priority=priority), num_bytes=len(request.body)
        )
    form = CompletionForm(
        Head.new("cmpl", service),
        service.tokenizer,
        with_logprobs=spec.gen.params.num_logprobs is not None,
        with_usage=spec.gen.include_usage,
    )
    await Answer(service, spec.gen, requests, form).send(request, reply)


class CompletionForm:
    """``text_completion``, whole and in chunks."""

    def __init__(self, head: Head, tokenizer: Tokenizer, *, with_logprobs: bool, with_usage: bool) -> None:
        self.head = head
        self._tokenizer = tokenizer
        self._with_logprobs = with_logprobs
        self._with_usage = with_usage

    def document(self, choices: Sequence[Whole], usage: schema.Usage) -> schema.Completion:
        completion = self._completion(
            [
                schema.CompletionChoice(index, whole.text, self._logprobs(whole.tokens), whole.finish_reason)
                for index, whole in enumerate(choices)
            ]
        )
        completion.usage = usage
        return completion

    def opening(self) -> list[schema.Completion]:
        return []

    def chunk(self, index: int, piece: Piece) -> schema.Completion:
        logprobs = self._logprobs(piece.tokens) if piece.tokens else None
        return self._completion([schema.CompletionChoice(index, piece.text, logprobs, piece.finish_reason)])

    def usage_chunk(self, usage: schema.Usage) -> schema.Completion:
        completion = self._completion([])
        completion.usage = usage
        return completion

    def _completion(self, choices: list[schema.CompletionChoice]) -> schema.Completion:
        return schema.Completion(
            id=self.head.id,
            created=self.head.created,
            model=self.head.model,
            system_fingerprint=self.head.system_fingerprint,
            choices=choices,
            usage=None if self._with_usage else UNSET,
        )

    def _logprobs(self, tokens: Sequence[TokenAt]) -> schema.CompletionLogprobs | None:
        return completion_logprobs(tokens, self._tokenizer) if self._with_logprobs else None
