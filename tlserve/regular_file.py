"""Files that a configuration names: regular ones only, of bounded size, every failure a ConfigError."""

from __future__ import annotations

import stat
from pathlib import Path

from tlserve.errors import ConfigError


def read_regular_file(path: Path, named: str, *, limit: int) -> bytes:
    """The contents of a file of at most ``limit`` bytes. Raises ConfigError, which begins with ``named``.

    A pipe or a device might never end, and would have nothing more for a second reader.
    """
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError(f"{named}: must be a regular file")
        if status.st_size > limit:
            raise ConfigError(f"{named}: must be at most {limit} bytes, has {status.st_size}")
        with path.open("rb") as file:
            return file.read(limit)
    except OSError as error:
        raise ConfigError(f"{named}: cannot be read: {error.strerror or error}") from None
    except ValueError:  # a NUL in the path
        raise ConfigError(f"{named}: must be the path of a file") from None
