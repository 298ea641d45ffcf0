"""Every error tlserve raises on purpose, named by whose fault it is and what the answer will be.

A client's fault or a passing condition is an ApiError: it carries all that its reply needs, and its
message names the value and the rule. What ends the server is an ExitError with the exit status of the
command. Anything else that is raised is our bug: its text goes to the log, never to a client.
"""

from __future__ import annotations

from typing import ClassVar


class TlserveError(Exception):
    """Base of every error raised on purpose."""


class ApiError(TlserveError):
    """A request that cannot be served as it stands; the class says how the reply looks."""

    status: ClassVar[int]
    kind: ClassVar[str] = "invalid_request_error"
    code: ClassVar[str | None] = None

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param

    @property
    def headers(self) -> list[tuple[str, str]]:
        """Headers that belong to this reply whatever its body."""
        return []


class RetryableError(ApiError):
    """The same request may succeed a moment later."""

    @property
    def headers(self) -> list[tuple[str, str]]:
        return [("Retry-After", "1")]


class InvalidRequest(ApiError):
    """A value, a header or the body breaks a rule."""

    status = 400


class ContextLengthExceeded(ApiError):
    """Prompt and answer together do not fit the context."""

    status = 400
    code = "context_length_exceeded"


class Unauthorized(ApiError):
    """No API key, or none that this server takes."""

    status = 401
    kind = "authentication_error"
    code = "invalid_api_key"

    @property
    def headers(self) -> list[tuple[str, str]]:
        return [("WWW-Authenticate", "Bearer")]


class RouteNotFound(ApiError):
    """No route has this path."""

    status = 404
    code = "route_not_found"


class ModelNotFound(ApiError):
    """Another model than the served one."""

    status = 404
    code = "model_not_found"


class KvHandleNotFound(ApiError):
    """A KV handle that does not exist."""

    status = 404
    code = "kv_handle_not_found"


class MethodNotAllowed(ApiError):
    """The path takes other methods, which ``Allow`` lists."""

    status = 405
    code = "method_not_allowed"

    def __init__(self, message: str, *, allow: tuple[str, ...]) -> None:
        super().__init__(message)
        self.allow = allow

    @property
    def headers(self) -> list[tuple[str, str]]:
        return [("Allow", ", ".join(self.allow))]


class RequestTimeout(ApiError):
    """The headers or the body took too long to arrive."""

    status = 408
    kind = "timeout_error"
    code = "request_timeout"


class PayloadTooLarge(ApiError):
    """The body is larger than ``max_body_bytes``."""

    status = 413
    code = "payload_too_large"


class UnsupportedParameter(ApiError):
    """A right value that is not served here."""

    status = 422
    code = "unsupported_parameter"


class Overloaded(RetryableError):
    """The queue is full."""

    status = 429
    kind = "rate_limit_error"
    code = "rate_limit_exceeded"


class HeadersTooLarge(ApiError):
    """The headers are too large or too many."""

    status = 431
    code = "headers_too_large"


class InternalFault(ApiError):
    """Something of ours broke; the log has the rest."""

    status = 500
    kind = "server_error"
    code = "internal_error"


class VersionNotSupported(ApiError):
    """The request is of another major version of HTTP."""

    status = 505
    code = "version_not_supported"


class Unavailable(RetryableError):
    """Base of the passing conditions of the server itself."""

    status = 503
    kind = "server_error"


class NoCapacity(Unavailable):
    """The request waited too long, or too many connections are open."""

    code = "no_capacity"


class ShuttingDown(Unavailable):
    """The server drains, or its engine has stopped."""

    code = "shutting_down"


class ModelLoading(Unavailable):
    """The model is not there yet."""

    code = "model_loading"


class ExitError(TlserveError):
    """The server cannot start or go on; the message is one line that says why."""

    exit_status: ClassVar[int]


class StoppedWhileLoading(ExitError):
    """A signal came before the server was ready; nothing was in flight."""

    exit_status = 0


class ConfigError(ExitError):
    """A configuration value breaks a rule; the message names file, key, value and rule."""

    exit_status = 2


class ModelError(ExitError):
    """A model cannot be loaded; the message names the file and the tensor or field."""

    exit_status = 3


class ListenError(ExitError):
    """An address cannot be listened on."""

    exit_status = 4


class EngineDied(ExitError):
    """A step of the engine failed; the log has the traceback, and a supervisor should start a new process."""

    exit_status = 70  # EX_SOFTWARE of sysexits.h
