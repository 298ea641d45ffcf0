"""The results of a run: for a terminal, as JSON, and as the XML that CI systems read."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tlserve.conform.case import Case
from tlserve.conform.run import Result

_NOT_XML = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def table(results: Sequence[Result]) -> str:
    """A line a case, what was sent, expected and came below each failure, and the sums."""
    width = max(len(result.case.id) for result in results)
    lines = []
    for result in results:
        note = result.reason if result.status == "skipped" else result.case.rule
        lines.append(f"{result.status:<8} {result.case.id:<{width}} {result.seconds:6.2f} s  {note}")
        if result.status == "failed":
            lines += [f"{'':9}{what:<9}{getattr(result, what)}" for what in ("sent", "expected", "came")]
            lines.append(f"{'':9}{'rule':<9}docs/{result.case.page}")
    return "\n".join([*lines, "", totals(results)])


def totals(results: Sequence[Result]) -> str:
    counts = Counter(result.status for result in results)
    parts = [f"{counts['passed']} of {len(results)} passed"]
    parts += [f"{counts[status]} {status}" for status in ("failed", "skipped") if counts[status]]
    return ", ".join(parts)


def listing(cases: Sequence[Case]) -> str:
    width = max(len(case.id) for case in cases)
    return "\n".join(f"{case.id:<{width}}  {case.level:<8}  {case.rule}" for case in cases)


def as_document(results: Sequence[Result], about: dict[str, Any]) -> dict[str, Any]:
    """The run as one JSON object; ``about`` says what was tested."""
    counts = Counter(result.status for result in results)
    return about | {
        "passed": counts["passed"],
        "failed": counts["failed"],
        "skipped": counts["skipped"],
        "cases": [
            {
                "id": result.case.id,
                "rule": result.case.rule,
                "page": result.case.page,
                "level": result.case.level,
                "status": result.status,
                "seconds": round(result.seconds, 3),
            }
            | {name: value for name in ("sent", "expected", "came", "reason") if (value := getattr(result, name))}
            for result in results
        ],
    }


def write_junit(path: Path, results: Sequence[Result], about: dict[str, Any], timestamp: str) -> None:
    """One suite; a case's area is its class, its id its name."""
    counts = Counter(result.status for result in results)
    seconds = f"{sum(result.seconds for result in results):.3f}"
    figures = {"tests": str(len(results)), "failures": str(counts["failed"]), "errors": "0", "time": seconds}
    root = ET.Element("testsuites", {"name": "conform", **figures})
    of_suite = {"skipped": str(counts["skipped"]), "timestamp": timestamp}
    suite = ET.SubElement(root, "testsuite", {"name": "conform", **figures, **of_suite})
    properties = ET.SubElement(suite, "properties")
    for name, value in about.items():
        ET.SubElement(properties, "property", {"name": name, "value": _xml(str(value))})
    for result in results:
        _add_case(suite, result)
    tree = ET.ElementTree(root)
    ET.indent(tree)
    tree.write(path, encoding="utf-8", xml_declaration=True)


def _add_case(suite: ET.Element, result: Result) -> None:
    case = ET.SubElement(
        suite,
        "testcase",
        {"classname": f"conform.{result.case.area}", "name": result.case.id, "time": f"{result.seconds:.3f}"},
    )
    if result.status == "skipped":
        ET.SubElement(case, "skipped", {"message": _xml(result.reason)})
    elif result.status == "failed":
        message = f"expected {result.expected}; came {result.came}"
        failure = ET.SubElement(case, "failure", {"type": "Failed", "message": _xml(message)})
        failure.text = _xml(
            f"{result.case.rule} (docs/{result.case.page})\n"
            f"sent {result.sent}\nexpected {result.expected}\ncame {result.came}"
        )


def _xml(text: str) -> str:
    """A server may send characters that no XML document can hold."""
    return _NOT_XML.sub("\N{REPLACEMENT CHARACTER}", text)
