"""/v1/models."""

from __future__ import annotations

from tests.openai.fakes import Api


async def test_models_are_listed_and_found() -> None:
    card = {"id": "succ", "object": "model", "created": 1_700_000_000, "owned_by": "trio-tlserve"}
    assert (await Api().call("/v1/models")).json == {"object": "list", "data": [card]}
    assert (await Api().call("/v1/models/succ")).json == card
    reply = await Api().call("/v1/models/other/one")
    assert (reply.status, reply.json["error"]["code"]) == (404, "model_not_found")


async def test_model_ids_may_hold_slashes_and_escapes() -> None:
    api = Api()
    api.service.model_id = "org/my model"
    for path in ("/v1/models/org/my%20model", "/v1/models/org%2Fmy%20model"):
        assert (await api.call(path)).json["id"] == "org/my model"
