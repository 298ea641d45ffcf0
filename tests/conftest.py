"""Settings of the whole suite."""

from __future__ import annotations

import os

import pytest
from hypothesis import settings

from fixtures.fetch_model import FetchError, fetch

# The quick profile runs with the other tests and gives the same examples every time; the fuzz profile looks for new
# ones, and `make fuzz` runs it again and again. No deadlines: how long an example takes depends on the machine's other
# work.
settings.register_profile("quick", derandomize=True, deadline=None)
settings.register_profile("fuzz", deadline=None, max_examples=3_000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))


@pytest.fixture(scope="session")
def fetched_smollm2() -> None:
    """Fetches SmolLM2 where it is not there yet. Without a network a test is skipped, and fails under CI=true."""
    try:
        fetch()
    except FetchError as error:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(str(error))
