"""Where SmolLM2 is, for the tests that need it: skipped without it on a user's machine, failing under CI=true."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

SMOLLM2 = Path(__file__).parents[2] / "artifacts/models/smol-135m/v3/SmolLM2-135M-Instruct.Q4_1.gguf"
needs_smollm2 = pytest.mark.skipif(
    not SMOLLM2.exists() and os.environ.get("CI") != "true", reason=f"{SMOLLM2.name} is not there: run `make model`"
)
