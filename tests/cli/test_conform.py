"""``trio-tlserve conform``: arguments, exit status, and what it prints and writes."""

from __future__ import annotations

import json
import socket
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.command import SUCC
from tests.conform.page import PAGE, page_text
from tlserve import ServeConfig, ServerHandle, spawn
from tlserve.cli import conform
from tlserve.conform.catalogue import ALL_CASES

DOCS = Path(__file__).parents[2] / "docs"
NO_ONE = "http://127.0.0.1:1/v1"


@pytest.fixture(scope="module")
def server() -> Iterator[ServerHandle]:
    with spawn(ServeConfig.for_model(SUCC)) as server:
        yield server


def health_url(server: ServerHandle) -> str:
    host, port = server.health_addr
    return f"http://{host}:{port}"


def test_chosen_cases_that_pass_are_status_0(server: ServerHandle, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--base-url", server.base_url, "--health-url", health_url(server), "--only", "models", "health.ready"]
    assert conform.main(arguments) == 0
    out = capsys.readouterr().out
    assert [line.split()[:2] for line in out.splitlines()[:-2]] == [
        ["passed", "models.list"],
        ["passed", "models.get"],
        ["passed", "models.escaped"],
        ["passed", "models.unknown"],
        ["passed", "health.ready"],
    ]
    assert out.endswith("\n5 of 5 passed\n")


def test_without_its_v1_a_base_url_is_the_same(server: ServerHandle) -> None:
    assert conform.main(["--base-url", server.base_url.removesuffix("/v1"), "--only", "models.list"]) == 0


def test_a_failure_is_status_1_and_in_every_report(
    server: ServerHandle, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [tmp_path / "conform.xml", tmp_path / "conform.json"]
    arguments = ["--base-url", server.base_url, "--model", "nobody", "--only", "chat.id", "health.ready"]
    assert conform.main([*arguments, "--junit", str(files[0]), "--json", str(files[1])]) == 1
    out = capsys.readouterr().out
    assert 'came     status 404 {"error"' in out
    assert "needs --health-url" in out
    suite = ET.parse(files[0]).getroot()[0]
    assert (suite.attrib["tests"], suite.attrib["failures"], suite.attrib["skipped"]) == ("2", "1", "1")
    document = json.loads(files[1].read_text())
    assert (document["model"], document["failed"], document["skipped"]) == ("nobody", 1, 1)
    assert [item["status"] for item in document["cases"]] == ["failed", "skipped"]


def test_the_list_has_every_case_and_needs_no_server(capsys: pytest.CaptureFixture[str]) -> None:
    assert conform.main(["--list"]) == 0
    lines = [line.split(maxsplit=2) for line in capsys.readouterr().out.splitlines()]
    assert lines == [[case.id, case.level, case.rule] for case in ALL_CASES]


def test_level_core_leaves_out_what_only_this_server_promises(capsys: pytest.CaptureFixture[str]) -> None:
    assert conform.main(["--list", "--level", "core"]) == 0
    ids = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert ids == [case.id for case in ALL_CASES if case.level == "core"]
    assert 0 < len(ids) < len(ALL_CASES)


def test_a_server_that_is_not_there_is_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["--model", "m"]):
        assert conform.main(["--base-url", NO_ONE, *arguments]) == 2
        assert "cannot connect to 127.0.0.1:1" in capsys.readouterr().err


def test_a_server_that_says_nothing_is_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        assert conform.main(["--base-url", f"http://127.0.0.1:{port}/v1", "--timeout", "0.1"]) == 2
    assert f"127.0.0.1:{port} gave no answer within 0.1 s" in capsys.readouterr().err


def test_what_has_no_such_route_may_be_another_url(server: ServerHandle, capsys: pytest.CaptureFixture[str]) -> None:
    assert conform.main(["--base-url", health_url(server)]) == 2
    assert capsys.readouterr().err.endswith("; is the URL right? it ends in /v1\n")


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        ([], "one of the arguments --base-url --list is required"),
        (["--base-url", "localhost:8000"], "--base-url: 'localhost:8000' is not an http:// or https:// URL"),
        (["--base-url", NO_ONE, "--health-url", "a"], "--health-url: 'a' is not an http:// or https:// URL"),
        (["--base-url", NO_ONE, "--timeout", "0"], "must be a number above 0, got '0'"),
        (["--base-url", NO_ONE, "--only", "chat.nothing"], "'chat.nothing' names no case of level contract"),
        (["--base-url", NO_ONE, "--level", "core", "--only", "health"], "'health' names no case of level core"),
        (["--base-url", NO_ONE, "--junit", "/no/such/directory/x.xml"], "/no/such/directory/x.xml: cannot be written"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(
    arguments: list[str], fault: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        conform.main(arguments)
    assert exit_info.value.code == 2
    assert fault in " ".join(capsys.readouterr().err.split())


def test_the_documentation_lists_the_cases_as_they_are() -> None:
    assert PAGE.read_text() == page_text(PAGE.read_text()), "run make generate"


def test_each_case_points_at_a_heading_of_the_documentation() -> None:
    for page, anchor in {tuple(case.page.split("#")) for case in ALL_CASES}:
        headings = [line.lstrip("# ") for line in (DOCS / page).read_text().splitlines() if line.startswith("#")]
        slugs = ["".join(c for c in text.lower() if c.isalnum() or c in " -").replace(" ", "-") for text in headings]
        assert anchor in slugs, (page, anchor)
