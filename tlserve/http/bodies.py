"""The memory that bodies take: of one request while it is served, and of all requests of a server together.

Rule 1: a body counts as it arrives, not as it is announced: who sends nothing takes nothing from others.
Rule 2: the beginning of a body is free, so that large bodies never keep small ones out.
"""

from __future__ import annotations

from tlserve.errors import NoCapacity
from tlserve.http.limits import FREE_BODY_BYTES


class Bodies:
    """What the bodies of a server hold at this moment, and the most they may."""

    def __init__(self, most: int) -> None:
        self.num_bytes = 0
        self._most = most

    def take(self, count: int) -> None:
        """Raises NoCapacity, and takes nothing, where there is no room for so many more bytes."""
        if self.num_bytes + count > self._most:
            raise NoCapacity(f"the bodies of other requests take all of {self._most} bytes")
        self.num_bytes += count

    def give_back(self, count: int) -> None:
        self.num_bytes -= count


class Body:
    """One body. It counts until ``drop``, which is for whoever made it to call; dropping it twice does nothing."""

    def __init__(self, bodies: Bodies) -> None:
        self._bodies = bodies
        self._data = bytearray()
        self._num_counted = 0

    def add(self, data: bytes | bytearray) -> None:
        """Raises NoCapacity; the body is then dropped."""
        num_more = max(len(self._data) + len(data) - FREE_BODY_BYTES, 0) - self._num_counted
        try:
            self._bodies.take(num_more)
        except NoCapacity:
            self.drop()
            raise
        self._num_counted += num_more
        self._data += data

    def take_all(self) -> bytes:
        """All that was added; it goes on to count."""
        whole = bytes(self._data)
        self._data.clear()
        return whole

    def drop(self) -> None:
        self._data.clear()
        self._bodies.give_back(self._num_counted)
        self._num_counted = 0
