"""The configuration and the files that it names, of bounded size, every failure a ConfigError."""

from __future__ import annotations

import stat
from pathlib import Path

from tlserve.errors import ConfigError


def read_regular_file(path: Path, named: str, *, limit: int, or_pipe: bool = False) -> bytes:
    """The contents of a file of at most ``limit`` bytes. Raises ConfigError, which begins with ``named``.

    A device might never end. A pipe, as ``<(...)`` of a shell is one, has nothing more for a second reader, so it is
    read only where nobody reads twice.
    """
    try:
        status = path.stat()
        if not (stat.S_ISREG(status.st_mode) or (or_pipe and stat.S_ISFIFO(status.st_mode))):
            raise ConfigError(f"{named}: must be a regular file")
        with path.open("rb") as file:
            data = file.read(limit + 1)
    except OSError as error:
        raise ConfigError(f"{named}: cannot be read: {error.strerror or error}") from None
    except ValueError:  # a NUL in the path
        raise ConfigError(f"{named}: must be the path of a file") from None
    if len(data) > limit:
        raise ConfigError(f"{named}: must be at most {limit} bytes")
    return data
