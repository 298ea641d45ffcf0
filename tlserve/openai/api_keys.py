"""The keys of ``api_keys_file``: who may use the routes under /v1.

Rule 1: keys are kept as digests, and nothing that is said to anybody quotes one.
Rule 2: a key is compared with every digest, so the time it takes tells neither whether nor where it matched.
Rule 3: a file that breaks a rule changes nothing: a server does not start with it, or keeps the keys it has.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from pathlib import Path
from typing import Final

from tlserve.errors import ConfigError, Unauthorized
from tlserve.http.messages import Request
from tlserve.regular_file import read_regular_file

MAX_FILE_BYTES: Final = 1 << 20  # some ten thousand keys
MAX_KEY_CHARS: Final = 512

_BLANKS: Final = " \t\r"
_LINE: Final = re.compile(r"[\t\x20-\x7e]*\r?")
_KEY: Final = re.compile(rf"[\x21-\x7e]{{1,{MAX_KEY_CHARS}}}")
_BEARER: Final = re.compile(r"bearer +(?P<key>[\x21-\x7e]+)", re.IGNORECASE)


class ApiKeys:
    """The keys that a server takes, as its file had them when it was last read."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError naming the file and the rule it breaks."""
        self._path = path
        self._digests = _read(path)

    def __len__(self) -> int:
        return len(self._digests)

    def __repr__(self) -> str:
        return f"<ApiKeys {len(self)} of {self._path}>"

    def reload(self) -> None:
        """Read the file again. Raises ConfigError, with the keys as they were."""
        self._digests = _read(self._path)

    def check(self, request: Request) -> None:
        """Raises Unauthorized unless the request brings one of the keys."""
        sent = [value for name, value in request.headers if name == "authorization"]
        bearer = _BEARER.fullmatch(sent[0]) if len(sent) == 1 else None
        if bearer is None:
            raise Unauthorized("an API key is required, in one header: Authorization: Bearer <key>")
        digest = _digest(bearer["key"])
        num_equal = sum(hmac.compare_digest(digest, known) for known in self._digests)
        if num_equal == 0:
            raise Unauthorized("the API key is not one that this server takes")


def _read(path: Path) -> tuple[bytes, ...]:
    """The digests of a file's keys. Empty lines and lines that begin with # are no keys.

    A line ends at a newline and nowhere else: what some programs take for the end of one would make two keys of a key.
    """
    fault = f"api_keys_file = {str(path)!r}"
    keys: list[str] = []
    for number, line in enumerate(_text(path, fault).split("\n"), 1):
        if not _LINE.fullmatch(line):
            raise ConfigError(f"{fault}: line {number}: must be printable ASCII")
        key = line.strip(_BLANKS)
        if not key or key.startswith("#"):
            continue
        if not _KEY.fullmatch(key):
            raise ConfigError(
                f"{fault}: line {number}: a key is 1 to {MAX_KEY_CHARS} printable ASCII characters without spaces"
            )
        keys.append(key)
    if not keys:
        raise ConfigError(f"{fault}: must have at least one key, one a line")
    return tuple({_digest(key): None for key in keys})


def _text(path: Path, fault: str) -> str:
    data = read_regular_file(path, fault, limit=MAX_FILE_BYTES)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{fault}: must be UTF-8 text, is not at byte {error.start}") from None


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
