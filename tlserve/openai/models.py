"""GET /v1/models and /v1/models/{id}."""

from __future__ import annotations

import msgspec

from tlserve.http.messages import Reply, Request, Response
from tlserve.openai import schema
from tlserve.openai.service import Service


async def list_models(service: Service, request: Request, reply: Reply) -> None:
    await reply.send(Response(200, msgspec.json.encode(schema.ModelList(data=[_card(service)]))))


async def get_model(service: Service, request: Request, reply: Reply) -> None:
    service.check_model(request.path_params["id"])
    await reply.send(Response(200, msgspec.json.encode(_card(service))))


def _card(service: Service) -> schema.ModelCard:
    return schema.ModelCard(id=service.model_id, created=service.created)
