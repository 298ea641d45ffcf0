"""What OpenTelemetry's environment variables ask for; read without OpenTelemetry, which need not be installed.

What is not read here (headers, certificates, compression, sampling, batching, limits) is read by its libraries.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

# The variables of one signal go before those of all; an empty one counts as unset.
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
DEFAULT_PROTOCOL = "http/protobuf"


def is_wanted(env: Mapping[str, str]) -> bool:
    """Whether there is a collector to send to, and neither the SDK nor its exporter has been turned off."""
    is_disabled = env.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    is_none = env.get("OTEL_TRACES_EXPORTER", "").strip().lower() == "none"
    return endpoint_variable(env) is not None and not is_disabled and not is_none


def endpoint_variable(env: Mapping[str, str]) -> str | None:
    """The variable that names the collector."""
    return next((name for name in _ENDPOINTS if env.get(name)), None)


def endpoint(env: Mapping[str, str]) -> str:
    """The address of the collector as it may be shown: without a password and without a query."""
    url = env.get(endpoint_variable(env) or "", "")
    return re.sub(r"^(\w+://)?[^/@]*@", r"\1", url).partition("?")[0]


def protocol(env: Mapping[str, str]) -> str:
    """``http/protobuf`` or ``grpc``. Raises ValueError naming variable, value and rule."""
    name = next((name for name in _PROTOCOLS if env.get(name)), None)
    value = env[name].strip().lower() if name else DEFAULT_PROTOCOL
    if value not in (DEFAULT_PROTOCOL, "grpc"):
        raise ValueError(f'{name} = {value!r}: must be "{DEFAULT_PROTOCOL}" or "grpc"')
    return value
