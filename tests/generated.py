"""What is written from elsewhere: the table of docs/configuration.md, docs/runtime.schema.json and docs/openapi.v1.yaml
and the names of docs/python.md from the code, the table of docs/metrics.md from docs/metrics.yaml, the bars of
docs/pictures/benchmarks.svg from docs/benchmarks.json. ``make generate``."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

import tlserve
from tests.bench import plots
from tests.cli import options
from tests.conform import page as conformance
from tlserve import pytest_plugin
from tlserve.config import json_schema
from tlserve.health import Health
from tlserve.http.router import Router
from tlserve.openai.app import add_document, all_routes
from tlserve.openai.openapi import document_bytes

ROOT = Path(__file__).parents[1]
SCHEMA_FILE = ROOT / "docs" / "runtime.schema.json"
OPENAPI_FILE = ROOT / "docs" / "openapi.v1.yaml"
CONFIGURATION_PAGE = ROOT / "docs" / "configuration.md"
METRICS_PAGE = ROOT / "docs" / "metrics.md"
PYTHON_PAGE = ROOT / "docs" / "python.md"
METRICS_FILE = ROOT / "docs" / "metrics.yaml"
_BEGIN, _END = "<!-- keys: make generate -->\n", "<!-- end of keys -->\n"
_METRICS_BEGIN, _METRICS_END = "<!-- metrics: make generate -->\n", "<!-- end of metrics -->\n"

_NAMES_BEGIN, _NAMES_END = "<!-- names: make generate -->\n", "<!-- end of names -->\n"


def schema_text() -> str:
    return json.dumps(json_schema(), indent=2) + "\n"


def openapi_document() -> dict[str, Any]:
    """What the server gives at /openapi.json."""
    router = Router()
    Health().add_api_routes(router)
    add_document(router)
    document: dict[str, Any] = json.loads(document_bytes(all_routes(router)))
    return document


class _Dumper(yaml.SafeDumper):
    """Paragraphs as blocks, which people can read."""


_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n\n" in text else None),
)


def openapi_text() -> str:
    text: str = yaml.dump(
        openapi_document(), Dumper=_Dumper, sort_keys=False, width=120, default_flow_style=None, allow_unicode=True
    )
    return text


def configuration_text(current: str) -> str:
    """``current`` with its table of keys made new."""
    head, rest = current.split(_BEGIN)
    return head + _BEGIN + keys_table() + _END + rest.split(_END)[1]


def keys_table() -> str:
    lines = ["| key | values | default | |", "|---|---|---|---|"]
    for name, schema in _rows(json_schema()["properties"]["engine"]["properties"]):
        default = f"`{json.dumps(schema['default'])}`" if "default" in schema else ""
        lines.append(f"| `{name}` | {_values(schema)} | {default} | {schema['description']} |")
    return "\n".join(lines) + "\n"


def metrics_text(current: str) -> str:
    """docs/metrics.md with its table made new."""
    head, rest = current.split(_METRICS_BEGIN)
    return head + _METRICS_BEGIN + metrics_table() + _METRICS_END + rest.split(_METRICS_END)[1]


def metrics_table() -> str:
    lines = ["| metric | type, unit | |", "|---|---|---|"]
    for metric in yaml.safe_load(METRICS_FILE.read_text()):
        text = " ".join([metric["meaning"], *_label_lines(metric.get("labels", {}))])
        lines.append(f"| `{metric['name']}` | {metric['type']}, {metric['unit']} | {text} |")
    return "\n".join(lines) + "\n"


def _label_lines(labels: dict[str, list[str] | str]) -> Iterator[str]:
    for name, values in labels.items():
        listed = values if isinstance(values, str) else ", ".join(f"`{value}`" for value in values)
        yield f"<br>`{name}`: {listed}"


def python_text(current: str) -> str:
    """docs/python.md with its table of public names made new."""
    head, rest = current.split(_NAMES_BEGIN)
    return head + _NAMES_BEGIN + names_table() + _NAMES_END + rest.split(_NAMES_END)[1]


def names_table() -> str:
    """Functions, then classes, then the fixture, each with the first paragraph of its docstring."""
    names = sorted(tlserve.__all__, key=lambda name: (name[0].isupper(), name))
    public = {f"tlserve.{name}": getattr(tlserve, name) for name in names}
    public["tlserve_server"] = pytest_plugin.tlserve_server
    lines = ["| name | |", "|---|---|"]
    for name, value in public.items():
        first = (inspect.getdoc(value) or "").split("\n\n")[0]
        lines.append(f"| `{name}` | {' '.join(first.split()).replace('``', '`')} |")
    return "\n".join(lines) + "\n"


def _rows(properties: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    for name, schema in properties.items():
        if "properties" in schema:
            yield from _rows(schema["properties"], f"{name}.")
        else:
            yield prefix + name, schema


def _values(schema: dict[str, Any]) -> str:
    if "enum" in schema:
        return ", ".join(f"`{json.dumps(choice)}`" for choice in schema["enum"])
    if "anyOf" in schema:
        return next(_values(option) for option in schema["anyOf"] if option != {"type": "null"})
    text = {"array": "list of strings", "string": "string", "integer": "integer"}[schema["type"]]
    if "minimum" in schema and "maximum" in schema:
        text += f" {schema['minimum']} to {schema['maximum']}"
    elif "minimum" in schema:
        text += f", {schema['minimum']} or more"
    return text + (f", multiple of {schema['multipleOf']}" if "multipleOf" in schema else "")


def main() -> None:
    SCHEMA_FILE.write_text(schema_text())
    OPENAPI_FILE.write_text(openapi_text())
    CONFIGURATION_PAGE.write_text(configuration_text(CONFIGURATION_PAGE.read_text()))
    PYTHON_PAGE.write_text(python_text(PYTHON_PAGE.read_text()))
    plots.write()
    METRICS_PAGE.write_text(metrics_text(METRICS_PAGE.read_text()))
    options.PAGE.write_text(options.page_text(options.PAGE.read_text()))
    conformance.PAGE.write_text(conformance.page_text(conformance.PAGE.read_text()))


if __name__ == "__main__":
    main()
