"""Text of a growing output: whole characters only, and nothing that may still turn into a stop string.

Rule 1: what was sent so far and what is still to come never depend on how the bytes were split.
Rule 2: the output ends at the leftmost place, over all stops, where a stop string begins.
Rule 3: what is held back is the longest end of the text that begins some stop string; no more.
Rule 4: the work is linear in the text, whatever the stops: a stop is read only as far as text has matched it.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Sequence


class TextStream:
    """Turns the bytes of generated tokens into text that is safe to send.

    Bytes that are not UTF-8 become U+FFFD as `bytes.decode("utf-8", "replace")` would do over the whole,
    so a character cut off at the end becomes one U+FFFD in `finish`.
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        """`stops` are the stop strings, none of them empty."""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._matchers = [_Matcher(stop) for stop in stops]
        self._held = _HeldText()
        self._num_chars = 0  # decoded so far, sent or held
        self._stop_at: int | None = None  # where the leftmost stop string found so far begins
        self._ended = False

    @property
    def stopped(self) -> bool:
        """Whether a stop string has ended the output; ask again after `finish`."""
        return self._ended and self._stop_at is not None

    def push(self, data: bytes) -> str:
        """Take the bytes of the next token; give the text that may be sent now."""
        return self._take(self._decoder.decode(data))

    def finish(self) -> str:
        """No more bytes will come; give the text still held. A second call gives nothing.

        A stop string whose place was in doubt, because an earlier one had begun, is settled here.
        """
        sent = self._take(self._decoder.decode(b"", final=True))
        return sent + self._end()

    def _take(self, text: str) -> str:
        if self._ended or not text:
            return ""
        self._num_chars += len(text)
        self._held.append(text)
        for matcher in self._matchers:
            found = matcher.feed(text)
            if found is not None and (self._stop_at is None or found < self._stop_at):
                self._stop_at = found
        # Characters from here on are part of a stop string that has begun.
        doubtful = min(
            (matcher.candidate for matcher in self._matchers if not matcher.is_done), default=self._num_chars
        )
        if self._stop_at is not None and self._stop_at <= doubtful:
            return self._end()
        return self._held.take_until(doubtful)

    def _end(self) -> str:
        if self._ended:
            return ""
        self._ended = True
        end = self._num_chars if self._stop_at is None else self._stop_at
        return self._held.take_until(end)


class _Matcher:
    """Finds the first occurrence of one stop string in text that comes in pieces (Knuth, Morris and Pratt).

    The failure table is built only as far as text has matched, so that a stop string of a megabyte costs nothing
    until it is generated.
    """

    def __init__(self, stop: str) -> None:
        assert stop, "an empty stop string matches everywhere"
        self._stop = stop
        self._num_seen = 0  # characters fed
        self._num_matched = 0  # length of the longest end of the text that begins the stop string
        self._borders = [0]  # borders[i]: longest proper prefix of stop[: i + 1] that also ends it
        self.is_done = False

    @property
    def candidate(self) -> int:
        """Where the stop string may have begun; the end of the text when it has not."""
        return self._num_seen - self._num_matched

    def feed(self, text: str) -> int | None:
        """Where the stop string begins, when `text` completes it for the first time."""
        if self.is_done:
            return None
        start, self._num_seen = self._num_seen, self._num_seen + len(text)
        stop, matched, place = self._stop, self._num_matched, 0
        while place < len(text):
            if matched == 0:
                place = text.find(stop[0], place)
                if place < 0:
                    break
            while matched and text[place] != stop[matched]:
                matched = self._border(matched)
            if text[place] == stop[matched]:
                matched += 1
            place += 1
            if matched == len(stop):
                self.is_done = True
                return start + place - matched
        self._num_matched = matched
        return None

    def _border(self, length: int) -> int:
        """Length of the longest proper prefix of stop[:length] that also ends it."""
        stop, borders = self._stop, self._borders
        while len(borders) < length:
            char, border = stop[len(borders)], borders[-1]
            while border and stop[border] != char:
                border = borders[border - 1]
            borders.append(border + 1 if stop[border] == char else 0)
        return borders[length - 1]


class _HeldText:
    """Text not sent yet, in pieces: joining it at each token would make a long hold quadratic."""

    def __init__(self) -> None:
        self._pieces: deque[str] = deque()
        self._num_sent = 0

    def append(self, text: str) -> None:
        self._pieces.append(text)

    def take_until(self, end: int) -> str:
        """Give and forget the text before position `end`, counted from the beginning of the whole output."""
        taken = []
        while self._num_sent < end:
            piece = self._pieces.popleft()
            room = end - self._num_sent
            if len(piece) > room:
                self._pieces.appendleft(piece[room:])
                piece = piece[:room]
            taken.append(piece)
            self._num_sent += len(piece)
        return "".join(taken)
