"""Cross-origin requests: which pages a browser may let read our answers (the CORS protocol of the Fetch standard).

Keys travel in ``Authorization``, which a page sets itself, so credentials of the browser are never allowed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from tlserve.errors import ConfigError
from tlserve.http.messages import Header, Request, Response

ANY: Final = "*"
_ORIGIN: Final = re.compile(r"[a-z][a-z0-9+.-]*://(?:[a-z0-9.-]+|\[[0-9a-f:.]+\])(?::[0-9]{1,5})?")

_EXPOSED: Final[Header] = ("Access-Control-Expose-Headers", "X-Request-Id, Retry-After, traceresponse")
_PREFLIGHT: Final[tuple[Header, ...]] = (
    ("Access-Control-Allow-Methods", "GET, HEAD, POST"),
    ("Access-Control-Allow-Headers", "*, Authorization"),  # the wildcard does not cover that one
    ("Access-Control-Max-Age", "7200"),  # seconds; the most that Chromium keeps it for
)


class Cors:
    """The origins that may read answers; none of them by default."""

    def __init__(self, origins: Sequence[str]) -> None:
        """Raises ConfigError for what is neither ``*`` nor an origin as browsers spell it."""
        for origin in origins:
            if origin != ANY and not _ORIGIN.fullmatch(origin):
                raise ConfigError(
                    f"cors_allow_origins = {origin!r}: "
                    'must be "*" or scheme://host[:port] in lower case and without a path'
                )
        self._origins = frozenset(origins)

    def headers(self, request: Request) -> tuple[Header, ...]:
        """What every answer to this request carries, errors and streams included."""
        if ANY in self._origins:
            return ("Access-Control-Allow-Origin", ANY), _EXPOSED
        if not self._origins:
            return ()
        vary = ("Vary", "Origin")  # a cache must not give one page's answer to another, nor to a page that has none
        if not self._allows(request):
            return (vary,)
        return ("Access-Control-Allow-Origin", request.header("origin") or ""), _EXPOSED, vary

    def preflight(self, request: Request) -> Response | None:
        """The answer to a browser that asks before it sends; None for any other request.

        A browser asks without a key, so this comes before anything that may refuse the request itself.
        """
        is_question = request.method == "OPTIONS" and request.header("access-control-request-method") is not None
        return Response(204, b"", _PREFLIGHT) if is_question and self._allows(request) else None

    def _allows(self, request: Request) -> bool:
        origin = request.header("origin")
        return origin is not None and (ANY in self._origins or origin in self._origins)
