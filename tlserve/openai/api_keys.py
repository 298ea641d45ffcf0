"""The keys of ``api_keys_file``: who may use the routes under /v1.

Rule 1: keys are kept as digests, and nothing that is said to anybody quotes one.
Rule 2: a key is compared with every digest, so the time it takes tells neither whether nor where it matched.
Rule 3: a file that breaks a rule changes nothing: a server does not start with it, or keeps the keys it has.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import stat
from pathlib import Path
from typing import Final

from tlserve.errors import ConfigError, Unauthorized
from tlserve.http.messages import Request

MAX_FILE_BYTES: Final = 1 << 20  # some ten thousand keys
MAX_KEY_CHARS: Final = 512

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
    """The digests of a file's keys. Empty lines and lines that begin with # are no keys."""
    fault = f"api_keys_file = {str(path)!r}"
    lines = _text(path, fault).splitlines()
    keys = {number: key for number, line in enumerate(lines, 1) if (key := line.strip()) and not key.startswith("#")}
    for number, key in keys.items():
        if not _KEY.fullmatch(key):
            raise ConfigError(
                f"{fault}: line {number}: a key is 1 to {MAX_KEY_CHARS} printable ASCII characters without spaces"
            )
    if not keys:
        raise ConfigError(f"{fault}: must have at least one key, one a line")
    return tuple({_digest(key): None for key in keys.values()})


def _text(path: Path, fault: str) -> str:
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # a pipe might never end, and has nothing more for a reload
            raise ConfigError(f"{fault}: must be a regular file")
        if status.st_size > MAX_FILE_BYTES:
            raise ConfigError(f"{fault}: must be at most {MAX_FILE_BYTES} bytes, has {status.st_size}")
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{fault}: cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{fault}: must be UTF-8 text, is not at byte {error.start}") from None


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
