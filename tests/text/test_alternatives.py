"""Invariant: one expression for many strings finds the longest of them that stands at a place, as a search would."""

from __future__ import annotations

import time

from hypothesis import given
from hypothesis import strategies as st

from tlserve.text.alternatives import longest_of


@given(st.lists(st.text("ab.|", max_size=6), max_size=12), st.text("ab.|", max_size=12))
def test_the_longest_string_at_the_first_place_matches(strings: list[str], text: str) -> None:
    found = [
        string for place in range(len(text)) for string in sorted(strings, key=len) if text.startswith(string, place)
    ]
    places = [place for place in range(len(text)) if any(s and text.startswith(s, place) for s in strings)]
    match = longest_of(strings).search(text)
    if not places:
        assert match is None
        return
    assert match is not None
    assert found
    longest = max((s for s in strings if text.startswith(s, places[0])), key=len)
    assert (match.start(), match[0]) == (places[0], longest)


def test_strings_nested_in_one_another_compile() -> None:
    pattern = longest_of("a" * size for size in range(1, 128))
    assert pattern.fullmatch("a" * 100)


def test_many_alike_strings_are_not_tried_one_by_one() -> None:
    pattern = longest_of(f"<unused{number}>" for number in range(6000))
    start = time.thread_time()
    assert pattern.sub("", "<unused" * 100_000) == "<unused" * 100_000
    assert time.thread_time() - start < 1
