"""What a server says when it refuses a request, and what to try then."""

from __future__ import annotations

from tlserve.cli.replies import NotThisApi, decode, refusals

MAX_SHOWN = 300  # characters of a reply that is no document of this API
KEY_VARIABLE = "OPENAI_API_KEY"
URL_VARIABLE = "OPENAI_BASE_URL"


def refusal(status: int, body: bytes) -> str:
    """One line for people: the status, the server's own message, and the option that may be wrong."""
    try:
        error = decode(refusals, body).error
        message, code = error.message, error.code
    except NotThisApi:
        message, code = body[:MAX_SHOWN].decode(errors="replace").strip(), None
    return f"{status}: {message}" + _hint(status, code)


def _hint(status: int, code: object) -> str:
    if status == 401:
        return f"; --api-key or {KEY_VARIABLE} gives a key"
    if status == 404 and code != "model_not_found":
        return "; is the URL right? it ends in /v1"
    return ""
