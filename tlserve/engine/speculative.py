"""Guessing the next tokens of one request, and how many of them to guess."""

from __future__ import annotations

from collections.abc import Sequence

LONGEST_PAUSE = 64  # steps without a draft after drafts that were all wrong


class DraftLength:
    """How many tokens to draft, from how the last drafts fared.

    A draft that is right in whole doubles the length. One that is right in part sets it to what was right and
    one more. One that is all wrong halves it, and from 1 goes to none: for a step, then 2, 4 and so on.
    """

    def __init__(self, longest: int) -> None:
        self._longest = longest
        self._length = longest
        self._pause = 1  # how long the next pause is
        self._num_to_skip = 0

    def next(self) -> int:
        """The length for this step; 0 = draft nothing."""
        if self._num_to_skip:
            self._num_to_skip -= 1
            return 0
        return self._length

    def record(self, num_drafted: int, num_accepted: int) -> None:
        """Learn from a draft of at least one token."""
        if num_accepted == num_drafted:
            self._length = min(2 * self._length, self._longest)
            self._pause = 1
        elif num_accepted:
            self._length = min(num_accepted + 1, self._longest)
            self._pause = 1
        elif self._length > 1:
            self._length //= 2
        else:
            self._num_to_skip = self._pause
            self._pause = min(2 * self._pause, LONGEST_PAUSE)


class NgramIndex:
    """What followed each n-gram of a growing text, most recent occurrence first to be found.

    Each token is indexed once, when the one after it is known: so the n-gram at the end of the text finds an
    earlier occurrence, never itself.
    """

    def __init__(self, *, shortest: int, longest: int) -> None:
        self._sizes = range(longest, shortest - 1, -1)
        self._tokens: list[int] = []
        self._following: dict[tuple[int, ...], int] = {}  # n-gram -> place of the token after its last occurrence

    def __len__(self) -> int:
        return len(self._tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        text, following = self._tokens, self._following
        for token in tokens:
            place = len(text)
            for size in self._sizes:
                if size <= place:
                    following[tuple(text[place - size :])] = place
            text.append(token)

    def continuation(self, count: int) -> list[int]:
        """Up to ``count`` tokens that followed the longest known n-gram at the end of the text."""
        text = self._tokens
        for size in self._sizes:
            place = self._following.get(tuple(text[-size:])) if size <= len(text) else None
            if place is not None:
                # Where the occurrence touches the end the text repeats with a period: the draft goes on with itself.
                period = len(text) - place
                return [text[place + i % period] for i in range(count)]
        return []


def num_accepted(draft: Sequence[int], drawn: Sequence[int]) -> int:
    """How many guesses equal the target's own draws, from the first on.

    ``drawn[i]`` is what the target draws after the first ``i`` guesses, so it counts only while those were right.
    """
    count = 0
    while count < len(draft) and draft[count] == drawn[count]:
        count += 1
    return count
