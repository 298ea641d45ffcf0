"""How many examples a Hypothesis test takes: few beside other tests, many in ``make fuzz``."""

from __future__ import annotations

from hypothesis import settings


def examples(quick: int, *, cost: int = 1) -> int:
    """``quick`` in the quick profile, else the profile's own number over ``cost``, for examples that take long."""
    profile = settings()  # the one that tests/conftest.py has loaded
    return quick if profile.derandomize else max(profile.max_examples // cost, 1)
