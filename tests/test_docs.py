"""What the documentation says is what the code does: generated parts are current, links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.bench import plots
from tests.bench.results import Results
from tests.generated import (
    CONFIGURATION_PAGE,
    METRICS_PAGE,
    OPENAPI_FILE,
    SCHEMA_FILE,
    configuration_text,
    metrics_text,
    openapi_text,
    schema_text,
)
from tests.metrics.listed import unknown_metrics
from tlserve.cli.commands import COMMANDS

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "docs/deploy").glob("*.md")])


def test_the_table_of_keys_is_current() -> None:
    assert CONFIGURATION_PAGE.read_text() == configuration_text(CONFIGURATION_PAGE.read_text()), "run make generate"


def test_the_published_schema_is_current() -> None:
    assert SCHEMA_FILE.read_text() == schema_text(), "run make generate"


def test_the_picture_of_the_benchmarks_is_of_the_figures() -> None:
    assert plots.PICTURE.read_text() == plots.picture(Results()), "run make generate"


def test_the_published_openapi_document_is_current() -> None:
    assert OPENAPI_FILE.read_text() == openapi_text(), "run make generate"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_inside_the_documentation_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:|#)([^)#\s]+)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_every_command_is_documented() -> None:
    text = "".join(page.read_text() for page in PAGES)
    assert [name for name in COMMANDS if name != "serve" and f"trio-tlserve {name}" not in text] == []


def test_make_targets_named_in_the_documentation_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {name for page in PAGES for name in re.findall(r"`make ([a-z-]+)", page.read_text())}
    assert named - targets == set()


def test_the_table_of_metrics_is_current() -> None:
    assert METRICS_PAGE.read_text() == metrics_text(METRICS_PAGE.read_text()), "run make generate"


def test_metrics_named_in_the_documentation_exist() -> None:
    """docs/metrics.yaml itself is compared with a live page, in tests/metrics."""
    assert {name for page in PAGES for name in unknown_metrics(page.read_text())} == set()
