from __future__ import annotations

import pytest

from tests.http.client import Handlers
from tlserve.errors import MethodNotAllowed, RouteNotFound
from tlserve.http.messages import Request
from tlserve.http.router import Router
from tlserve.http.target import parse_target


@pytest.fixture
def router() -> Router:
    handlers = Handlers()
    router = Router()
    router.add("GET", "/v1/models", handlers.health)
    router.add("GET", "/v1/models/{id:path}", handlers.model)
    router.add("POST", "/jobs/{name}/stop", handlers.echo)
    router.add("DELETE", "/jobs/{name}/stop", handlers.echo)
    return router


def build_request(method: str, target: str) -> Request:
    parsed = parse_target(method, target)
    return Request(method, parsed.path, parsed.query, (), b"", "id", raw_path=parsed.raw_path)


@pytest.mark.parametrize(
    ("target", "route", "params"),
    [
        ("/v1/models", "/v1/models", {}),
        ("/v1/models?x", "/v1/models", {}),
        ("/%761/models", "/v1/models", {}),
        ("/v1/models/a", "/v1/models/{id:path}", {"id": "a"}),
        ("/v1/models/org/name", "/v1/models/{id:path}", {"id": "org/name"}),
        ("/v1/models/org%2Fname", "/v1/models/{id:path}", {"id": "org/name"}),
        ("/v1/models/a%20b%252F", "/v1/models/{id:path}", {"id": "a b%2F"}),
    ],
)
def test_a_path_finds_its_route_and_its_parameters(
    router: Router, target: str, route: str, params: dict[str, str]
) -> None:
    for method in ("GET", "HEAD"):
        request = build_request(method, target)
        router.check(request)
        assert request.notes["route"] == route
        assert request.path_params == params


def test_a_parameter_is_one_whole_segment(router: Router) -> None:
    request = build_request("POST", "/jobs/a%2Fb/stop")
    router.check(request)
    assert request.path_params == {"name": "a/b"}


@pytest.mark.parametrize(
    "target",
    [
        "/",
        "/v1",
        "/v1/",
        "/v1/models/",
        "//v1/models",
        "/v1//models",
        "/v1%2Fmodels",
        "/v1/x/../models",
        "/jobs//stop",
        "/jobs/a/b/stop",
        "/jobs/a",
        "/V1/models",
    ],
)
def test_an_unknown_path_is_no_route(router: Router, target: str) -> None:
    with pytest.raises(RouteNotFound, match=r"^no route for this path$"):
        router.check(build_request("GET", target))


def test_an_unknown_path_is_told_where_it_is_or_what_there_is() -> None:
    router = Router(elsewhere={"/metrics": "it is next door"}, hint="all is below /v1")
    for target, where in (("/metrics?x", "it is next door"), ("/metrics/", "all is below /v1")):
        with pytest.raises(RouteNotFound, match=rf"^no route for this path; {where}$"):
            router.check(build_request("GET", target))


@pytest.mark.parametrize(
    ("method", "target", "allow"),
    [
        ("POST", "/v1/models", ("GET", "HEAD")),
        ("OPTIONS", "/v1/models", ("GET", "HEAD")),
        ("get", "/v1/models", ("GET", "HEAD")),
        ("GET", "/jobs/a/stop", ("DELETE", "POST")),
        ("HEAD", "/jobs/a/stop", ("DELETE", "POST")),
    ],
)
def test_a_known_path_says_which_methods_it_takes(
    router: Router, method: str, target: str, allow: tuple[str, ...]
) -> None:
    with pytest.raises(MethodNotAllowed) as caught:
        router.check(build_request(method, target))
    assert caught.value.allow == allow
    assert caught.value.headers == [("Allow", ", ".join(allow))]


def test_options_for_the_whole_server_passes(router: Router) -> None:
    router.check(build_request("OPTIONS", "*"))
