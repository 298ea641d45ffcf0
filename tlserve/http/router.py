"""From method and path to a handler."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final
from urllib.parse import unquote

from tlserve.errors import MethodNotAllowed, RouteNotFound
from tlserve.http.messages import Handler, Reply, Request, Response

_EMPTY: Final[Mapping[str, str]] = MappingProxyType({})
_PARAMETER: Final = re.compile(r"\{(?P<name>[a-z_]+)(?P<rest>:path)?\}")


@dataclass(frozen=True, slots=True)
class _Route:
    method: str
    pattern: str
    handler: Handler

    def match(self, segments: list[str]) -> dict[str, str] | None:
        """The parameters of a path given as decoded segments, or None when it is another path."""
        params: dict[str, str] = {}
        wanted = self.pattern.split("/")
        for index, want in enumerate(wanted):
            parameter = _PARAMETER.fullmatch(want)
            if parameter is not None and parameter["rest"]:
                params[parameter["name"]] = "/".join(segments[index:])
                return params if params[parameter["name"]] else None
            if index >= len(segments):
                return None
            if parameter is not None and segments[index]:
                params[parameter["name"]] = segments[index]
            elif want != segments[index]:
                return None
        return params if len(segments) == len(wanted) else None


class Router:
    """A handler that hands each request to the handler of its route.

    A pattern is a path whose segments are literal, ``{name}`` (one segment that is not empty) or, at
    the end, ``{name:path}`` (all that is left). Paths are cut into segments before they are decoded: an
    escaped slash is part of a segment. HEAD is served by the handler of GET. The matching pattern goes
    into ``request.notes["route"]`` and the parameters into ``request.path_params``.
    """

    def __init__(self, *, elsewhere: Mapping[str, str] = _EMPTY, hint: str = "") -> None:
        """``elsewhere`` says of paths where they are; ``hint`` says of all others what there is."""
        self._routes: list[_Route] = []
        self._elsewhere = elsewhere
        self._hint = hint

    def add(self, method: str, pattern: str, handler: Handler) -> None:
        self._routes.append(_Route(method, pattern, handler))

    @property
    def routes(self) -> tuple[tuple[str, str], ...]:
        """Method and pattern of each route; HEAD, which comes with GET, is not listed."""
        return tuple((route.method, route.pattern) for route in self._routes)

    def check(self, request: Request) -> None:
        """Raises RouteNotFound or MethodNotAllowed when no handler would be called."""
        if request.path != "*":
            self._find(request)

    async def __call__(self, request: Request, reply: Reply) -> None:
        if request.path == "*":
            # OPTIONS for the server as a whole: a ping that says what may be asked.
            allow = _allow({route.method for route in self._routes})
            await reply.send(Response(204, b"", (("Allow", ", ".join(allow)),)))
        else:
            await self._find(request).handler(request, reply)

    def _find(self, request: Request) -> _Route:
        segments = [unquote(segment) for segment in (request.raw_path or request.path).split("/")]
        method = "GET" if request.method == "HEAD" else request.method
        allowed: set[str] = set()
        for route in self._routes:
            params = route.match(segments)
            if params is None:
                continue
            request.notes["route"] = route.pattern
            if route.method == method:
                request.path_params.update(params)
                return route
            allowed.add(route.method)
        if not allowed:
            where = self._elsewhere.get(request.path, self._hint)
            raise RouteNotFound("no route for this path" + (f"; {where}" if where else ""))
        allow = _allow(allowed)
        raise MethodNotAllowed(f"this path takes {', '.join(allow)}", allow=allow)


def _allow(methods: set[str]) -> tuple[str, ...]:
    return tuple(sorted(methods | {"HEAD"} if "GET" in methods else methods))
