"""Traces of requests, sent by OTLP where OpenTelemetry's environment variables say so. docs/tracing.md is the manual.

Rule 1: no fault of tracing (no library, a wrong variable, no collector) stops the server or a request; the log has it.
Rule 2: OpenTelemetry is imported when traces are wanted, and by this package only. Nothing of it is set globally, so
        servers of one process, and the program around them, have traces of their own.
Rule 3: a trace holds no text of a prompt or an answer.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tlserve.http.trace import BeginTrace
from tlserve.log import LOGGER
from tlserve.tracing.environment import endpoint_variable, is_wanted
from tlserve.tracing.guard import Guard


@asynccontextmanager
async def follow_requests(*, scheme: str) -> AsyncIterator[BeginTrace | None]:
    """For the length of a block, what begins a request's trace; None where the environment asks for no traces.

    ``scheme`` is http or https.

    Resource handling: at the end of the block, what has not been sent gets FLUSH_TIMEOUT; no thread is left.
    """
    if not is_wanted(os.environ):
        yield None
        return
    try:
        # Here, so that a server without traces neither needs nor loads the libraries.
        from tlserve.tracing.export import Export
        from tlserve.tracing.spans import Tracer

        export = Export.from_environment(os.environ)
    except ImportError:
        LOGGER.warning(
            "no traces are sent: they need pip install '.[otel]' in the sources",
            extra={"variable": endpoint_variable(os.environ)},
        )
        yield None
        return
    except Exception as error:  # whatever the libraries raise for a variable they cannot read
        LOGGER.warning("no traces are sent", extra={"reason": str(error)})
        yield None
        return
    try:
        yield Guard(Tracer(export.tracer, scheme=scheme).begin).begin
    finally:
        await export.aclose()
