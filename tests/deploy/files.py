"""The files of docs/deploy/ as Python values."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from tests.deploy.programs import DEPLOY

KUBERNETES = DEPLOY / "kubernetes"
Document = dict[str, Any]


def documents(path: Path) -> list[Document]:
    """The documents of a YAML file."""
    return list(yaml.safe_load_all(path.read_text()))


def manifests() -> dict[str, Document]:
    """Every Kubernetes object, by kind/name."""
    paths = [path for path in sorted(KUBERNETES.glob("*.yaml")) if path.name != "kustomization.yaml"]
    found = [item for path in [*paths, KUBERNETES / "monitoring/service-monitor.yaml"] for item in documents(path)]
    return {f"{item['kind']}/{item['metadata']['name']}": item for item in found}


def kustomization() -> Document:
    return documents(KUBERNETES / "kustomization.yaml")[0]


def overrides() -> dict[str, str]:
    """The TL_ENGINE__ variables that kustomization.yaml gives to the servers."""
    generators = {item["name"]: item for item in kustomization()["configMapGenerator"]}
    return dict(line.split("=", 1) for line in generators["trio-tlserve-overrides"]["literals"])


def instructions(path: Path = DEPLOY / "Containerfile") -> list[tuple[str, str]]:
    """The instructions of a Containerfile, each with its words on one line."""
    lines = "".join(line for line in path.read_text().splitlines(True) if not line.startswith("#"))
    joined = re.sub(r"\s*\\\n\s*", " ", lines)
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in joined.splitlines() if line)]


def only(name: str) -> str:
    """The words of the one instruction of the final image that has this name."""
    stage = [place for place, (word, _) in enumerate(instructions()) if word == "FROM"][-1]
    (found,) = [rest for word, rest in instructions()[stage:] if word == name]
    return found


def unit() -> dict[str, str]:
    """The settings of the systemd unit; what is there more than once has its last value."""
    text = (DEPLOY / "trio-tlserve.service").read_text()
    return dict(re.findall(r"^(\w+)=(.*)$", text, re.MULTILINE))
