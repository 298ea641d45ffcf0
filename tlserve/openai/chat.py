"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import UNSET

from tlserve.http.messages import Reply, Request
from tlserve.openai import prepare, schema
from tlserve.openai.answer import Answer, Head, Whole
from tlserve.openai.choice import Piece, TokenAt
from tlserve.openai.logprobs import chat_logprobs
from tlserve.openai.parse import parse_chat
from tlserve.openai.service import Service, read_priority, refuse_kv_handle
from tlserve.text.tokenizer import Tokenizer


async def chat_completions(service: Service, request: Request, reply: Reply) -> None:
    refuse_kv_handle(request)
    priority = read_priority(request)
    with service.loop.hold_place():
        spec = await service.parse(parse_chat, request.body)
        service.check_model(spec.gen.model)
        requests = await service.off_loop(
            lambda: prepare.chat_requests(service, spec, priority=priority),
            num_bytes=len(request.body),
            may_inline=False,  # a template is a program: a short input may take long
        )
    form = ChatForm(
        Head.new("chatcmpl", service),
        service.tokenizer,
        with_logprobs=spec.gen.params.num_logprobs is not None,
        with_usage=spec.gen.include_usage,
    )
    await Answer(service, spec.gen, requests, form).send(request, reply)


class ChatForm:
    """``chat.completion`` and ``chat.completion.chunk``."""

    def __init__(self, head: Head, tokenizer: Tokenizer, *, with_logprobs: bool, with_usage: bool) -> None:
        self.head = head
        self._tokenizer = tokenizer
        self._with_logprobs = with_logprobs
        self._with_usage = with_usage

    def document(self, choices: Sequence[Whole], usage: schema.Usage) -> schema.ChatCompletion:
        return schema.ChatCompletion(
            id=self.head.id,
            created=self.head.created,
            model=self.head.model,
            system_fingerprint=self.head.system_fingerprint,
            choices=[
                schema.ChatChoice(
                    index,
                    schema.AssistantMessage(content=whole.text),
                    self._logprobs(whole.tokens),
                    whole.finish_reason,
                )
                for index, whole in enumerate(choices)
            ],
            usage=usage,
        )

    def opening(self) -> list[schema.ChatChunk]:
        return [self._chunk([schema.ChatChunkChoice(0, schema.Delta(role="assistant", content=""))])]

    def chunk(self, index: int, piece: Piece) -> schema.ChatChunk:
        delta = schema.Delta(content=piece.text)
        logprobs = self._logprobs(piece.tokens) if piece.tokens else None
        return self._chunk([schema.ChatChunkChoice(index, delta, logprobs, piece.finish_reason)])

    def usage_chunk(self, usage: schema.Usage) -> schema.ChatChunk:
        chunk = self._chunk([])
        chunk.usage = usage
        return chunk

    def _chunk(self, choices: list[schema.ChatChunkChoice]) -> schema.ChatChunk:
        return schema.ChatChunk(
            id=self.head.id,
            created=self.head.created,
            model=self.head.model,
            system_fingerprint=self.head.system_fingerprint,
            choices=choices,
            usage=None if self._with_usage else UNSET,
        )

    def _logprobs(self, tokens: Sequence[TokenAt]) -> schema.ChatLogprobs | None:
        return chat_logprobs(tokens, self._tokenizer) if self._with_logprobs else None
