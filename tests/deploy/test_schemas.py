"""Each file of docs/deploy/ is read by the program it is for, or against that program's own schema.

The programs are Debian's, the schemas those of the ``deploy`` extra; ``make deploy-check`` installs both.
"""

from __future__ import annotations

import importlib
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.files import KUBERNETES, Document, documents, manifests
from tests.deploy.programs import DEPLOY, missing, needed
from tests.deploy.proxies import Backend, haproxy_config, nginx_config, write_nginx

# The oldest that has the sleep of preStop, and the newest that the package knows.
KUBERNETES_VERSIONS = ("1.30", "1.37")
ALERTS = DEPLOY / "prometheus-alerts.yaml"


def module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        missing(f"the Python package of {name}")


def output(command: Sequence[str | Path], *, cwd: Path | None = None) -> str:
    """What a command prints; it must succeed."""
    result = subprocess.run([str(word) for word in command], cwd=cwd, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout + result.stderr


def is_custom(document: Document) -> bool:
    return str(document["apiVersion"]).startswith("monitoring.coreos.com/")


@pytest.mark.parametrize("version", KUBERNETES_VERSIONS)
@pytest.mark.parametrize("name", [name for name, item in manifests().items() if not is_custom(item)])
def test_a_manifest_is_what_kubernetes_takes(name: str, version: str) -> None:
    validator = module("kubernetes_validate")
    validator.validate(manifests()[name], version, strict=True)


def test_the_service_monitor_is_what_the_operator_takes() -> None:
    models = module("cloudcoil.models.prometheus_operator").v1
    models.ServiceMonitor.model_validate(manifests()["ServiceMonitor/trio-tlserve"], extra="forbid")


def test_alerts_in_the_frame_of_the_guide_are_a_rule_that_the_operator_takes() -> None:
    models = module("cloudcoil.models.prometheus_operator").v1
    (command,) = re.findall(r"^\$ (\(printf .*\)) \| kubectl", (DEPLOY / "README.md").read_text(), re.MULTILINE)
    rule = yaml.safe_load(output(["sh", "-c", command], cwd=DEPLOY.parents[1]))
    assert rule["spec"] == documents(ALERTS)[0]
    models.PrometheusRule.model_validate(rule, extra="forbid")


def test_the_pod_of_the_guide_that_fills_the_volume_is_what_kubernetes_takes() -> None:
    (overrides,) = re.findall(r"--overrides='(.*)'", (DEPLOY / "README.md").read_text())
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "loader"}, **json.loads(overrides)}
    module("kubernetes_validate").validate(pod, KUBERNETES_VERSIONS[0], strict=True)
    claim = pod["spec"]["volumes"][0]["persistentVolumeClaim"]["claimName"]
    assert f"PersistentVolumeClaim/{claim}" in manifests()


def test_kustomize_puts_the_manifests_together(tmp_path: Path) -> None:
    kubectl = needed("kubectl")
    directory = shutil.copytree(KUBERNETES, tmp_path / "kubernetes", ignore=shutil.ignore_patterns("api_keys"))
    (directory / "api_keys").write_text("a-key-of-a-test\n")
    built = {item["kind"]: item for item in yaml.safe_load_all(output([kubectl, "kustomize", directory]))}
    pod = built["Deployment"]["spec"]["template"]["spec"]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert re.fullmatch(r"trio-tlserve-config-\w+", volumes["config"]["configMap"]["name"])
    assert volumes["api-keys"]["secret"]["secretName"] == built["Secret"]["metadata"]["name"]
    assert {item["image"] for item in pod["containers"] + pod["initContainers"]} == {
        "registry.example/trio-tlserve:0.1.0"
    }


def test_the_compose_file_is_what_compose_takes() -> None:
    module("compose_pydantic").ComposeSpecification.model_validate(documents(DEPLOY / "compose.yaml")[0])


def test_prometheus_takes_its_file_and_the_alerts() -> None:
    output([needed("promtool"), "check", "config", DEPLOY / "prometheus.yml"])


def test_the_containerfile_has_nothing_that_hadolint_knows_better() -> None:
    hadolint = Path(sys.executable).parent / "hadolint"
    if not hadolint.exists():
        missing("hadolint")
    assert output([hadolint, DEPLOY / "Containerfile"]) == ""


def test_haproxy_takes_its_file() -> None:
    output([needed("haproxy"), "-c", "-f", DEPLOY / "haproxy.cfg"])


def test_nginx_takes_its_file(tmp_path: Path) -> None:
    main = write_nginx(tmp_path, (DEPLOY / "nginx.conf").read_text())
    output([needed("nginx"), "-t", "-e", tmp_path / "error.log", "-c", main])


def test_tests_change_nothing_but_addresses_of_the_proxies_files() -> None:
    backends = [Backend(("10.0.0.1", 8000), ("10.0.0.1", 9464)), Backend(("10.0.0.2", 8000), ("10.0.0.2", 9464))]

    def rest(text: str) -> list[str]:
        return [line for line in text.splitlines() if not re.match(r" +(server|bind|listen) ", line) or "{" in line]

    for name, made in (("haproxy.cfg", haproxy_config), ("nginx.conf", nginx_config)):
        assert rest(made(("127.0.0.1", 1), backends)) == rest((DEPLOY / name).read_text())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of how the package itself is written
def test_envoys_file_is_what_its_messages_hold() -> None:
    """No Envoy runs here: every field, enumeration and duration is held to the messages of its API."""
    messages = module("envoy_data_plane.envoy.config.bootstrap.v3")
    text = (DEPLOY / "envoy.yaml").read_text()
    for package in set(re.findall(r"type\.googleapis\.com/([\w.]+)\.\w+", text)):
        importlib.import_module(f"envoy_data_plane.{package}")
    messages.Bootstrap.from_dict(yaml.safe_load(text))
    with pytest.raises(KeyError, match="lb_policies"):
        messages.Bootstrap.from_dict(yaml.safe_load(text.replace("lb_policy:", "lb_policies:")))


@pytest.fixture
def unit_file(tmp_path: Path) -> Path:
    """The unit, with a program that is there."""
    text, count = re.subn(r"(?m)^ExecStart=\S+", "ExecStart=/bin/true", (DEPLOY / "trio-tlserve.service").read_text())
    assert count == 1
    path = tmp_path / "trio-tlserve.service"
    path.write_text(text)
    return path


def test_systemd_takes_the_unit_without_a_word(unit_file: Path) -> None:
    assert output([needed("systemd-analyze"), "verify", "--man=no", unit_file]) == ""


def test_the_unit_is_as_closed_as_it_claims(unit_file: Path) -> None:
    """Below 2.0 of 10; what is left is the network, and code that is compiled in the process."""
    output([needed("systemd-analyze"), "security", "--offline=yes", "--threshold=20", unit_file])
