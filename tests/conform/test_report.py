"""How results are shown: to people, as JSON, and as JUnit XML that holds whatever a server has sent."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

from tlserve.conform import report
from tlserve.conform.case import Case
from tlserve.conform.found import SHORT, short
from tlserve.conform.run import Result
from tlserve.conform.subject import Subject


async def passes(server: Subject) -> None: ...


def case(id: str) -> Case:
    return Case(id=id, rule=f"rule of {id}", page="api.md#errors", level="core", check=passes)


RESULTS = [
    Result(case=case("chat.usage"), status="passed", seconds=0.25),
    Result(
        case=case("err.400"), status="failed", seconds=1.5, sent="POST /x <&>", expected="status 400", came="\x00\ud800"
    ),
    Result(case=case("health.ready"), status="skipped", reason="needs --health-url"),
]
ABOUT = {"base_url": "http://a/v1", "model": "m\x1b[31m", "level": "core"}


def junit(path: Path) -> ET.Element:
    report.write_junit(path / "conform.xml", RESULTS, ABOUT, "2026-01-02T03:04:05")
    return ET.parse(path / "conform.xml").getroot()


def test_the_table_says_of_a_failure_what_was_sent_expected_and_came() -> None:
    lines = [line.split() for line in report.table(RESULTS[:2]).splitlines()]
    assert lines[0] == ["passed", "chat.usage", "0.25", "s", "rule", "of", "chat.usage"]
    assert lines[1][:2] == ["failed", "err.400"]
    assert lines[2] == ["sent", "POST", "/x", "<&>"]
    assert lines[3] == ["expected", "status", "400"]
    assert lines[4][0] == "came"
    assert lines[5] == ["rule", "docs/api.md#errors"]
    assert lines[-1] == ["1", "of", "2", "passed,", "1", "failed"]


def test_the_table_says_why_a_case_was_skipped() -> None:
    last, _, totals = report.table(RESULTS).splitlines()[-3:]
    assert last.endswith("needs --health-url")
    assert totals == "1 of 3 passed, 1 failed, 1 skipped"


def test_junit_counts_what_it_holds(tmp_path: Path) -> None:
    root = junit(tmp_path)
    (suite,) = root
    for element in (root, suite):
        counts = [element.attrib[name] for name in ("tests", "failures", "errors", "time")]
        assert counts == ["3", "1", "0", "1.750"]
    assert (suite.attrib["skipped"], "skipped" in root.attrib) == ("1", False)  # the schema has none for all suites
    assert (root.tag, suite.tag, suite.attrib["name"]) == ("testsuites", "testsuite", "conform")
    assert suite.attrib["timestamp"] == "2026-01-02T03:04:05"
    assert [item.tag for item in suite] == ["properties", "testcase", "testcase", "testcase"]


def test_junit_names_cases_by_area_and_id(tmp_path: Path) -> None:
    cases = junit(tmp_path).findall("testsuite/testcase")
    names = [(item.attrib["classname"], item.attrib["name"], item.attrib["time"]) for item in cases]
    assert names == [
        ("conform.chat", "chat.usage", "0.250"),
        ("conform.err", "err.400", "1.500"),
        ("conform.health", "health.ready", "0.000"),
    ]
    assert [[child.tag for child in item] for item in cases] == [[], ["failure"], ["skipped"]]


def test_junit_holds_no_character_that_xml_cannot(tmp_path: Path) -> None:
    root = junit(tmp_path)
    failure = root.find("testsuite/testcase/failure")
    assert failure is not None
    assert failure.attrib == {"type": "Failed", "message": "expected status 400; came \ufffd\ufffd"}
    assert failure.text is not None
    assert failure.text.splitlines()[1:] == ["sent POST /x <&>", "expected status 400", "came \ufffd\ufffd"]
    values = {item.attrib["name"]: item.attrib["value"] for item in root.findall("testsuite/properties/property")}
    assert values == ABOUT | {"model": "m\ufffd[31m"}


def test_json_has_the_counts_and_every_case() -> None:
    document = report.as_document(RESULTS, ABOUT)
    assert {name: document[name] for name in ("passed", "failed", "skipped")} == {
        "passed": 1,
        "failed": 1,
        "skipped": 1,
    }
    assert document["cases"][0] == {
        "id": "chat.usage",
        "rule": "rule of chat.usage",
        "page": "api.md#errors",
        "level": "core",
        "status": "passed",
        "seconds": 0.25,
    }
    assert document["cases"][1]["expected"] == "status 400"
    assert document["cases"][2]["reason"] == "needs --health-url"


def test_what_a_report_quotes_is_one_short_line() -> None:
    assert short("a\n b\t\tc") == "a b c"
    text = short("x" * 10_000 + "end")
    assert len(text) <= SHORT
    assert text.endswith("end")
