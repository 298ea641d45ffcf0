"""Programs that the deployment files are for. ``make deploy-check`` installs them; without them tests are skipped."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import NoReturn

import pytest

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "docs" / "deploy"
SBIN = "/usr/sbin"  # where Debian's packages put servers, which is not on everybody's path


def find(name: str) -> Path | None:
    found = shutil.which(name, path=f"{os.environ.get('PATH', '')}:{SBIN}")
    return Path(found) if found else None


def needed(name: str) -> Path:
    """The program, or the end of the test: skipped, or failed where ``make deploy-check`` has promised it."""
    found = find(name)
    if found is None:
        missing(name)
    return found


def missing(what: str) -> NoReturn:
    """Skips the test; fails it where ``make deploy-check`` has promised ``what``."""
    if os.environ.get("DEPLOY") == "full":
        pytest.fail(f"{what} is not installed")
    pytest.skip(f"{what} is not installed; make deploy-check installs it")
