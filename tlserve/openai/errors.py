"""How errors look on the wire: one document, alone or as the last event of a broken stream."""

from __future__ import annotations

import msgspec

from tlserve.errors import ApiError
from tlserve.http import sse
from tlserve.http.messages import ErrorRenderer, Response
from tlserve.openai.schema import ErrorDetail, ErrorDocument


def error_document(error: ApiError) -> bytes:
    """``{"error": {"message", "type", "param", "code"}}``, whatever text the message holds.

    A message may quote header text of a client; what is no valid text there is replaced, never an error.
    """
    message = error.message.encode("utf-8", "replace").decode()
    return msgspec.json.encode(ErrorDocument(ErrorDetail(message, error.kind, error.param, error.code)))


def error_response(error: ApiError) -> Response:
    """The whole reply for an error before a response has started."""
    return Response(error.status, error_document(error), (("Content-Type", "application/json"), *error.headers))


def error_event(error: ApiError) -> bytes:
    """What a started stream gets instead of its ``[DONE]``."""
    return sse.event(error_document(error))


ERRORS = ErrorRenderer(response=error_response, event=error_event)
