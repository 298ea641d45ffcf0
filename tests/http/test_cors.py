"""Which headers a browser is given, and what it may ask before it sends."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from tests.http.client import RENDERER, Handlers, MemoryListener, RawClient, build, get, post
from tlserve.errors import ConfigError
from tlserve.http.cors import Cors
from tlserve.http.limits import Limits
from tlserve.http.messages import Request
from tlserve.http.serve import HttpServer

PAGE = "https://app.example"


def request(method: str = "GET", **headers: str) -> Request:
    fields = tuple((name.replace("_", "-"), value) for name, value in headers.items())
    return Request(method, "/v1/models", "", fields, b"", "req-1")


def test_without_origins_nothing_is_added_and_nothing_is_answered() -> None:
    cors = Cors(())
    question = request("OPTIONS", origin=PAGE, access_control_request_method="POST")
    assert cors.headers(question) == ()
    assert cors.preflight(question) is None


def test_a_listed_origin_is_named_and_others_are_not() -> None:
    cors = Cors([PAGE, "http://localhost:3000"])
    headers = dict(cors.headers(request(origin="http://localhost:3000")))
    assert headers["Access-Control-Allow-Origin"] == "http://localhost:3000"
    assert headers["Access-Control-Expose-Headers"] == "X-Request-Id, Retry-After, traceresponse"
    assert headers["Vary"] == "Origin"
    assert "Access-Control-Allow-Credentials" not in headers
    for other in (request(), request(origin="https://app.example.org"), request(origin="null"), request(origin="*")):
        assert cors.headers(other) == (("Vary", "Origin"),)


def test_a_star_is_for_every_page() -> None:
    cors = Cors(["*"])
    for anyone in (request(), request(origin=PAGE), request(origin="null")):
        assert dict(cors.headers(anyone))["Access-Control-Allow-Origin"] == "*"


def test_a_preflight_is_answered_for_listed_origins_only() -> None:
    cors = Cors([PAGE])
    answer = cors.preflight(request("OPTIONS", origin=PAGE, access_control_request_method="POST"))
    assert answer is not None
    assert (answer.status, answer.body) == (204, b"")
    assert dict(answer.headers)["Access-Control-Allow-Headers"] == "*, Authorization"
    assert "POST" in dict(answer.headers)["Access-Control-Allow-Methods"]
    assert int(dict(answer.headers)["Access-Control-Max-Age"]) > 0
    for other in (
        request("OPTIONS", origin="https://other.example", access_control_request_method="POST"),
        request("OPTIONS", access_control_request_method="POST"),
        request("OPTIONS", origin=PAGE),
        request("POST", origin=PAGE, access_control_request_method="POST"),
    ):
        assert cors.preflight(other) is None


@pytest.mark.parametrize(
    "origin",
    ["", "app.example", "https://app.example/", "https://app.example/path", "https://App.example", "null", "https://",
     "https://*.example", "https://a.example https://b.example", "https://a.example\r\nX: y"],
)  # fmt: skip
def test_what_no_browser_would_send_is_refused_at_start(origin: str) -> None:
    with pytest.raises(ConfigError, match=r"^cors_allow_origins = .*: must be") as caught:
        Cors([PAGE, origin])
    assert "\n" not in str(caught.value)


async def test_the_headers_are_on_every_answer_to_a_request(autojump_clock: trio.testing.MockClock) -> None:
    """Whole answers, streams, refusals of the route, the handler and the size, our own faults, drain, deadlines."""
    handlers = Handlers()
    router = handlers.router()
    cors = Cors([PAGE])
    server = HttpServer(
        router, RENDERER, Limits(max_body_bytes=100), name="api", check=router.check, headers_for=cors.headers
    )
    listener = MemoryListener()

    async def answer(data: bytes) -> tuple[int, str | None]:
        client = RawClient(listener.connect())
        await client.send(data)
        response = await client.response()
        return response.status, response.header("access-control-allow-origin")

    origin = f"Origin: {PAGE}"
    async with trio.open_nursery() as nursery:
        nursery.start_soon(server.serve, [listener])
        assert await answer(build("GET", "/healthz", origin)) == (200, PAGE)
        assert await answer(build("POST", "/stream", origin, "Content-Length: 1") + b"3") == (200, PAGE)
        assert await answer(build("GET", "/nowhere", origin)) == (404, PAGE)
        assert await answer(build("GET", "/echo", origin)) == (405, PAGE)
        assert await answer(build("POST", "/refuse", origin, "Content-Length: 0")) == (400, PAGE)
        assert await answer(build("POST", "/bug", origin, "Content-Length: 0")) == (500, PAGE)
        assert await answer(build("POST", "/echo", origin, "Content-Length: 101")) == (413, PAGE)
        assert await answer(build("POST", "/echo", origin, "Content-Length: 5")) == (408, PAGE)
        assert await answer(get("/healthz")) == (200, None)
        assert await answer(build("GET", "/healthz", "Origin: https://other.example")) == (200, None)
        assert await answer(b"GET / HTTP/1.1\r\nOrigin : x\r\n\r\n") == (400, None)
        late = RawClient(listener.connect())
        await late.send(post("/echo", b"x")[:10])
        await trio.testing.wait_all_tasks_blocked()
        server.drain()
        await late.send(b"echo HTTP/1.1\r\nHost: x\r\nOrigin: https://app.example\r\n\r\n")
        refused = await late.response()
        assert (refused.status, refused.header("access-control-allow-origin")) == (503, PAGE)
