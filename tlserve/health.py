"""Is the process alive, should it get traffic, and what are its figures: the health port."""

from __future__ import annotations

import enum
import json

import trio

from tlserve.http.messages import Reply, Request, Response
from tlserve.http.router import Router
from tlserve.metrics.page import Metrics


class Phase(enum.Enum):
    """The life of a server, in order. Only READY gets traffic; only FAILED is unhealthy."""

    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"


class Health:
    """The phase of one server and the routes that show it."""

    def __init__(self) -> None:
        self.phase = Phase.LOADING
        self.metrics = Metrics()

    def add_api_routes(self, router: Router) -> None:
        """What the API port shows, under the two names that clients ask for."""
        router.add("GET", "/healthz", self.healthz)
        router.add("GET", "/health", self.healthz)

    def router(self) -> Router:
        """The routes of the health port."""
        router = Router(hint="the health port has /healthz, /readyz and /metrics")
        router.add("GET", "/healthz", self.healthz)
        router.add("GET", "/readyz", self.readyz)
        router.add("GET", "/metrics", self.metrics_page)
        return router

    async def healthz(self, request: Request, reply: Reply) -> None:
        """200 while the process can go on."""
        is_alive = self.phase is not Phase.FAILED
        await reply.send(_status(200 if is_alive else 503, "ok" if is_alive else self.phase.value))

    async def readyz(self, request: Request, reply: Reply) -> None:
        """200 when new traffic is welcome; the body says why it is not."""
        await reply.send(_status(200 if self.phase is Phase.READY else 503, self.phase.value))

    async def metrics_page(self, request: Request, reply: Reply) -> None:
        """What Prometheus scrapes, in the format that its Accept header asks for."""
        # Some milliseconds of work, which no token should wait for.
        page, content_type = await trio.to_thread.run_sync(self.metrics.page, request.header("accept") or "")
        await reply.send(Response(200, page, (("Content-Type", content_type),)))


def _status(status: int, word: str) -> Response:
    return Response(status, json.dumps({"status": word}).encode())
