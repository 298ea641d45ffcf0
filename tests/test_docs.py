"""What the documentation says is what the code does: generated parts are current, links lead somewhere."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import tlserve
from tests.bench import plots
from tests.bench.results import Results
from tests.generated import (
    CONFIGURATION_PAGE,
    METRICS_PAGE,
    OPENAPI_FILE,
    PYTHON_PAGE,
    SCHEMA_FILE,
    configuration_text,
    metrics_text,
    openapi_text,
    python_text,
    schema_text,
)
from tests.metrics.listed import unknown_metrics
from tests.snippets import DOCS, PAGES, ROOT
from tlserve.cli.commands import COMMANDS
from tlserve.cli.terminal import OutputLost
from tlserve.errors import ApiError, ExitError
from tlserve.health import Health
from tlserve.http.router import Router
from tlserve.openai.app import add_document, all_routes


def test_the_table_of_keys_is_current() -> None:
    assert CONFIGURATION_PAGE.read_text() == configuration_text(CONFIGURATION_PAGE.read_text()), "run make generate"


def test_the_published_schema_is_current() -> None:
    assert SCHEMA_FILE.read_text() == schema_text(), "run make generate"


def test_the_table_of_public_names_is_current() -> None:
    assert PYTHON_PAGE.read_text() == python_text(PYTHON_PAGE.read_text()), "run make generate"


def test_the_picture_of_the_benchmarks_is_of_the_figures() -> None:
    assert plots.PICTURE.read_text() == plots.picture(Results()), "run make generate"


def test_the_published_openapi_document_is_current() -> None:
    assert OPENAPI_FILE.read_text() == openapi_text(), "run make generate"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_inside_the_documentation_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:|#)([^)#\s]+)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


def anchors(page: Path) -> set[str]:
    """Those of a page's headings that GitHub and the site spell alike."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S), re.MULTILINE)
    bare = [re.sub(r"[^\w\s-]", "", heading).strip().lower() for heading in headings]
    return {text.replace(" ", "-") for text in bare} & {re.sub(r"[-\s]+", "-", text) for text in bare}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_to_a_heading_lead_to_one(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#\s]*\.md)?#([^)\s]+)\)", page.read_text())
    assert [link for link in links if link[1] not in anchors(page.parent / link[0] if link[0] else page)] == []


def test_every_command_is_documented() -> None:
    text = "".join(page.read_text() for page in PAGES)
    assert [name for name in COMMANDS if name != "serve" and f"trio-tlserve {name}" not in text] == []


def test_make_targets_named_in_the_documentation_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    spelled = re.compile(r"(?:`|^\$ )make ([a-z-]+)", re.MULTILINE)
    named = {name for page in PAGES for name in spelled.findall(page.read_text())}
    assert named - targets == set()


def test_the_table_of_metrics_is_current() -> None:
    assert METRICS_PAGE.read_text() == metrics_text(METRICS_PAGE.read_text()), "run make generate"


def test_metrics_named_in_the_documentation_exist() -> None:
    """docs/metrics.yaml itself is compared with a live page, in tests/metrics."""
    assert {name for page in PAGES for name in unknown_metrics(page.read_text())} == set()


def rows(page: str) -> Iterator[list[str]]:
    """The cells of each row of a page's tables, without the backquotes around them."""
    for line in (DOCS / page).read_text().splitlines():
        if line.startswith("| "):
            yield [cell.strip().strip("`") for cell in line.strip("|").split("|")]


def leaves(kind: type[Any]) -> Iterator[type[Any]]:
    """The errors that are raised: those that no other is derived from."""
    below = [leaf for derived in kind.__subclasses__() for leaf in leaves(derived)]
    yield from below or [kind]


def test_each_error_of_the_api_is_documented_and_no_other() -> None:
    documented = {tuple(row[:3]) for row in rows("errors.md") if re.fullmatch(r"\d{3}", row[0]) and len(row) == 5}
    assert documented == {(str(error.status), error.code or "null", error.kind) for error in leaves(ApiError)}


def test_each_exit_status_is_documented_and_no_other_exception() -> None:
    documented = {(row[0], row[1]) for row in rows("errors.md") if len(row) == 4 and row[1] not in ("", "exception")}
    assert OutputLost in leaves(ExitError)  # of the commands, which nothing else here would import
    assert documented == {(str(error.exit_status), error.__name__) for error in leaves(ExitError)}


def test_each_route_is_documented() -> None:
    api, health = Router(), Health()
    health.add_api_routes(api)
    add_document(api)
    routes = [f"`{method} {path.replace(':path', '')}`" for method, path in all_routes(api) | {*health.router().routes}]
    text = (DOCS / "api.md").read_text()
    assert [route for route in routes if route not in text] == []


def test_each_variable_of_the_environment_is_documented() -> None:
    source = "".join(path.read_text() for path in (ROOT / "tlserve").rglob("*.py"))
    named = set(re.findall(r"environ(?:\.get\(|\[)\"(\w+)\"", source)) - {"TERM"}
    text = CONFIGURATION_PAGE.read_text()
    assert [name for name in sorted(named) if name not in text] == []
    assert "TLSERVE_ISA" in named


def test_each_public_name_is_in_the_reference_of_python() -> None:
    text = (DOCS / "python.md").read_text()
    assert set(re.findall(r"^::: tlserve\.(\w+)$", text, re.MULTILINE)) == set(tlserve.__all__)


def test_each_page_has_its_place_in_the_site() -> None:
    """Some pages of the site stand at the top of the repository; docs/site/hooks.py brings them in."""
    nav = yaml.safe_load((DOCS / "site" / "mkdocs.yml").read_text())["nav"]
    listed = {page for section in nav for pages in section.values() for page in pages}
    assert listed - {"changelog.md", "contributing.md"} == {
        str(page.relative_to(DOCS)) for page in PAGES if page.is_relative_to(DOCS)
    }


def test_contributing_names_each_make_target() -> None:
    targets = re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE)
    text = (ROOT / "CONTRIBUTING.md").read_text()
    assert [target for target in targets if f"`make {target}`" not in text] == []
