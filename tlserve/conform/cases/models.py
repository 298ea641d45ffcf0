"""GET /v1/models and /v1/models/{id}."""

from __future__ import annotations

from tlserve.conform.case import Cases
from tlserve.conform.subject import Subject

CASES = Cases("api.md#the-api", "core")


@CASES.add("models.list", "/models is a list with an object for each model, the served one among them")
async def list_models(server: Subject) -> None:
    document = (await server.get("/models")).has_status(200).document
    document["object"].equals("list")
    for card in document["data"].items():
        card["id"].text()
        card["object"].equals("model")
        card["created"].integer()
        card["owned_by"].text()
    ids = [card["id"].value for card in document["data"].items()]
    document["data"].check(server.model in ids, f"one whose id is {server.model}")


@CASES.add("models.get", "/models/{id} is the model's object of the list")
async def get_model(server: Subject) -> None:
    card = (await server.get(f"/models/{server.model}")).has_status(200).document
    card["object"].equals("model")
    card["id"].equals(server.model)


@CASES.add("models.escaped", "an id may be percent-escaped in the path", level="contract")
async def escaped_id(server: Subject) -> None:
    escaped = "".join(f"%{byte:02X}" for byte in server.model.encode())
    card = (await server.get(f"/models/{escaped}")).has_status(200).document
    card["id"].equals(server.model)


@CASES.add("models.unknown", "/models/{id} of no model is 404 model_not_found", level="contract")
async def unknown_model(server: Subject) -> None:
    (await server.get("/models/no/such-model")).refuses(404, code="model_not_found")
