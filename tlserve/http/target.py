"""The request target and the Host header: which resource is meant (RFC 9112 section 3, RFC 3986)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final
from urllib.parse import unquote_to_bytes

from tlserve.errors import InvalidRequest

_HOST_PATTERN: Final = r"(?:(?:[A-Za-z0-9._~!$&'()*+,;=-]|%[0-9A-Fa-f]{2})*|\[[0-9A-Fa-f:.]+\])(?::[0-9]*)?"
_HOST: Final = re.compile(_HOST_PATTERN)
_ABSOLUTE: Final = re.compile(rf"https?://(?P<host>{_HOST_PATTERN})(?P<rest>[/?].*)?", re.IGNORECASE)
_BAD_ESCAPE: Final = re.compile(r"%(?![0-9A-Fa-f]{2})")


@dataclass(frozen=True, slots=True)
class Target:
    path: str  # percent-decoded once; "*" for the server as a whole
    raw_path: str  # as received
    query: str


def parse_target(method: str, target: str) -> Target:
    """Splits a target of origin-form, absolute-form or asterisk-form; raises InvalidRequest for any other."""
    if target == "*" and method == "OPTIONS":
        return Target("*", "*", "")
    if "#" in target:
        raise InvalidRequest("a request target has no fragment")
    raw_path, _, query = _origin_form(target).partition("?")
    return Target(decode_path(raw_path), raw_path, query)


def decode_path(raw_path: str) -> str:
    """Undoes percent-encoding once; raises InvalidRequest for a broken escape or bytes that are not UTF-8."""
    if _BAD_ESCAPE.search(raw_path):
        raise InvalidRequest("the path holds a % that is not followed by two hexadecimal digits")
    try:
        return unquote_to_bytes(raw_path).decode("utf-8")
    except UnicodeDecodeError:
        raise InvalidRequest("the path is not UTF-8 after percent-decoding") from None


def check_host(host: str) -> None:
    """Raises InvalidRequest unless the value of a Host header is a host with an optional port."""
    if not _HOST.fullmatch(host):
        raise InvalidRequest("the Host header is not a host name with an optional port")


def _origin_form(target: str) -> str:
    # "//a/b" is a path whose first segment is empty, never an authority.
    if target.startswith("/"):
        return target
    absolute = _ABSOLUTE.fullmatch(target)
    if absolute is None or not absolute["host"] or absolute["host"].startswith(":"):
        raise InvalidRequest("the request target must be a path or an http(s) URL")
    rest: str = absolute["rest"] or ""
    return rest if rest.startswith("/") else "/" + rest
