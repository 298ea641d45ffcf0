"""Where SmolLM2 is, for the tests that need it."""

from __future__ import annotations

import pytest

from fixtures.fetch_model import MEMBER, MODEL_DIR

SMOLLM2 = MODEL_DIR / MEMBER.rpartition("/")[2]
needs_smollm2 = pytest.mark.usefixtures("fetched_smollm2")  # fetched once, then kept
