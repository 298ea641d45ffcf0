"""The id that ties a response to its lines in the log."""

from __future__ import annotations

import random
import re
import secrets
from collections.abc import Iterable
from typing import Final

# Nothing in this alphabet can end a header or forge a line in a log.
_WELL_FORMED: Final = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
# An id is unique and no secret. To ask the kernel for each would give the interpreter lock away twice a request, and
# under load each time takes a tenth of a millisecond until it is back: as long as parsing the head.
_GENERATOR: Final = random.Random(secrets.randbits(128))


def fresh_request_id() -> str:
    return f"req-{_GENERATOR.getrandbits(96):024x}"


def request_id_of(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """The client's own X-Request-Id when it sent exactly one that is well formed, else a fresh one."""
    sent = [value for name, value in headers if name == b"x-request-id"]
    if len(sent) == 1 and _WELL_FORMED.fullmatch(sent[0]):
        return sent[0].decode("ascii")
    return fresh_request_id()
