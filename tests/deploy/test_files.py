"""The files of docs/deploy/ against the server they are for: keys, routes, ports, times."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.files import (
    KUBERNETES,
    documents,
    instructions,
    kustomization,
    manifests,
    only,
    overrides,
    unit,
)
from tests.deploy.programs import DEPLOY, ROOT
from tlserve import ServeConfig
from tlserve.config import json_schema, parse_listen
from tlserve.health import Health
from tlserve.openai.stream import PING_INTERVAL
from tlserve.server import CUT_TIMEOUT

DEFAULTS = ServeConfig.for_model("model")
PROXY_FILES = ("haproxy.cfg", "nginx.conf", "envoy.yaml")


def of_cluster() -> ServeConfig:
    """What a pod is configured with."""
    text = (KUBERNETES / "runtime.toml").read_text()
    return ServeConfig.from_toml(text, overrides() | {"TL_ENGINE__THREADS": "2"})


def of_image() -> ServeConfig:
    return ServeConfig.from_toml((DEPLOY / "container.toml").read_text(), {})


def pod() -> Any:
    return manifests()["Deployment/trio-tlserve"]["spec"]["template"]["spec"]


def server() -> Any:
    (container,) = pod()["containers"]
    return container


def _is_route(path: str) -> bool:
    return ("GET", path) in Health().router().routes


# The image


def test_the_image_runs_as_a_user_known_by_number_who_is_not_root() -> None:
    assert int(only("USER").split(":")[0]) > 0


def test_the_entry_of_the_image_is_the_server_itself_so_that_signals_reach_it() -> None:
    entry = json.loads(only("ENTRYPOINT"))
    assert [Path(entry[0]).name, len(entry)] == ["trio-tlserve", 1]
    assert json.loads(only("CMD")) == ["/etc/trio-tlserve/runtime.toml"]
    assert only("STOPSIGNAL") == "SIGTERM"


def test_the_ports_of_the_image_are_those_of_its_configuration_on_all_interfaces() -> None:
    addresses = [parse_listen(of_image().http_listen, "http"), parse_listen(of_image().health_listen, "health")]
    assert addresses == [(None, int(port)) for port in only("EXPOSE").split()]


def test_the_health_check_of_the_image_asks_a_route_on_its_health_port() -> None:
    check = only("HEALTHCHECK")
    found = re.search(r"http://127\.0\.0\.1:(\d+)(/\w+)", check)
    assert found is not None
    assert (None, int(found[1])) == parse_listen(of_image().health_listen, "health_listen")
    assert _is_route(found[2])


def test_everything_that_the_image_copies_is_in_its_context() -> None:
    ignored = (DEPLOY / "Containerfile.dockerignore").read_text().splitlines()
    copies = [rest.split() for name, rest in instructions() if name == "COPY" and "--from" not in rest]
    sources = [source for *several, _ in copies for source in several]
    assert sources
    for source in sources:
        assert (ROOT / source).exists()
        assert f"!{source.rstrip('/')}" in ignored


def test_the_version_of_the_image_is_that_of_the_package() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert ("ARG", f"VERSION={version}") in instructions()
    assert [image["newTag"] for image in kustomization()["images"]] == [version]


# Kubernetes


def test_the_configuration_of_the_pods_is_one_that_the_server_takes() -> None:
    config = of_cluster()
    assert (str(config.model_dir), config.model_id, config.engine.threads) == ("/models/smol-135m", "smol-135m", 2)
    assert config.log_format == "json"


def test_variables_of_the_manifests_are_keys_of_the_configuration() -> None:
    text = "".join(path.read_text() for path in DEPLOY.rglob("*") if path.is_file())
    names = set(re.findall(r"TL_ENGINE__([A-Z_]+)", text))
    assert names
    assert {name.lower() for name in names} <= json_schema()["properties"]["engine"]["properties"].keys()


def test_probes_ask_routes_of_the_health_port() -> None:
    ports = {port["name"]: port["containerPort"] for port in server()["ports"]}
    assert ports == {
        "api": parse_listen(of_cluster().http_listen, "http_listen")[1],
        "health": parse_listen(of_cluster().health_listen, "health_listen")[1],
    }
    probes = {name: server()[f"{name}Probe"]["httpGet"] for name in ("startup", "readiness", "liveness")}
    assert {name: probe["path"] for name, probe in probes.items()} == {
        "startup": "/readyz",
        "readiness": "/readyz",
        "liveness": "/healthz",  # a server that drains, or loads, must not be killed for it
    }
    assert {probe["port"] for probe in probes.values()} == {"health"}
    assert all(_is_route(probe["path"]) for probe in probes.values())


def test_a_pod_has_the_time_that_its_drain_takes() -> None:
    stop = server()["lifecycle"]["preStop"]["sleep"]["seconds"]
    needed = stop + of_cluster().drain_timeout_ms / 1000 + CUT_TIMEOUT
    assert needed < pod()["terminationGracePeriodSeconds"] <= needed + 10


def test_a_pod_stays_until_its_readiness_has_been_seen() -> None:
    probe = server()["readinessProbe"]
    assert server()["lifecycle"]["preStop"]["sleep"]["seconds"] > probe["periodSeconds"] * probe["failureThreshold"]


def test_containers_are_locked_down() -> None:
    assert pod()["securityContext"]["runAsNonRoot"]
    assert pod()["securityContext"]["runAsUser"] == int(only("USER").split(":")[0])
    assert pod()["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not pod()["automountServiceAccountToken"]
    for container in [*pod()["initContainers"], *pod()["containers"]]:
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }


def test_the_kernels_of_the_image_are_copied_into_the_cache_that_the_server_writes() -> None:
    cache = dict(item.split("=", 1) for item in only("ENV").split())["TLSERVE_CACHE_DIR"]
    (init,) = pod()["initContainers"]
    mounts = {mount["mountPath"]: mount["name"] for mount in server()["volumeMounts"]}
    target = {mount["mountPath"]: mount["name"] for mount in init["volumeMounts"]}
    assert init["command"] == ["cp", "-R", f"{cache}/.", "/writable/"]
    assert mounts[cache] == target["/writable"] == "kernel-cache"


def test_volumes_are_where_the_configuration_looks() -> None:
    mounts = {mount["name"]: mount["mountPath"] for mount in server()["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod()["volumes"]}
    config = of_cluster()
    assert mounts.keys() == volumes.keys()
    assert config.api_keys_file is not None
    (key_file,) = kustomization()["secretGenerator"][0]["files"]
    assert str(config.api_keys_file) == f"{mounts['api-keys']}/{key_file}"
    assert str(config.model_dir).startswith(mounts["models"])
    assert json.loads(only("CMD")) == [f"{mounts['config']}/runtime.toml"]
    generated = {item["name"] for kind in ("configMap", "secret") for item in kustomization()[f"{kind}Generator"]}
    assert {volumes["config"]["configMap"]["name"], volumes["api-keys"]["secret"]["secretName"]} <= generated
    assert f"PersistentVolumeClaim/{volumes['models']['persistentVolumeClaim']['claimName']}" in manifests()


def test_selectors_find_what_they_are_for() -> None:
    found = manifests()
    labels = found["Deployment/trio-tlserve"]["spec"]["template"]["metadata"]["labels"]
    assert found["Deployment/trio-tlserve"]["spec"]["selector"]["matchLabels"] == labels
    for name in ("Service/trio-tlserve", "Service/trio-tlserve-pods"):
        assert found[name]["spec"]["selector"] == labels
        assert {port["targetPort"] for port in found[name]["spec"]["ports"]} == {"api", "health"}
    assert found["PodDisruptionBudget/trio-tlserve"]["spec"]["selector"]["matchLabels"] == labels
    assert found["NetworkPolicy/trio-tlserve"]["spec"]["podSelector"]["matchLabels"] == labels
    monitor = found["ServiceMonitor/trio-tlserve"]["spec"]
    wanted = monitor["selector"]["matchLabels"].items()
    services = [item for name, item in found.items() if name.startswith("Service/")]
    chosen = [item for item in services if wanted <= item["metadata"]["labels"].items()]
    assert [item["metadata"]["name"] for item in chosen] == ["trio-tlserve"], "each pod is scraped once"
    assert monitor["endpoints"][0]["port"] in {port["name"] for port in chosen[0]["spec"]["ports"]}
    assert _is_route(monitor["endpoints"][0]["path"])


def test_the_autoscaler_goes_by_a_metric_that_the_server_has_and_the_adapter_gives() -> None:
    autoscaler = manifests()["HorizontalPodAutoscaler/trio-tlserve"]["spec"]
    (metric,) = autoscaler["metrics"]
    name = metric["pods"]["metric"]["name"]
    (rule,) = documents(KUBERNETES / "monitoring/prometheus-adapter.yaml")[0]["rules"]["custom"]
    assert rule["name"]["as"] == name
    assert rule["seriesQuery"].startswith(f"{name}{{")
    assert name in (ROOT / "tlserve/metrics/engine.py").read_text()
    assert int(metric["pods"]["target"]["averageValue"]) < of_cluster().queue_capacity
    assert "replicas" not in manifests()["Deployment/trio-tlserve"]["spec"], "they are the autoscaler's"


def test_kustomize_names_every_manifest() -> None:
    files = {path.name for path in KUBERNETES.glob("*.yaml")} - {"kustomization.yaml"}
    assert set(kustomization()["resources"]) == files
    assert "docs/deploy/kubernetes/api_keys" in (ROOT / ".gitignore").read_text().splitlines()


# Compose, systemd


def test_compose_has_the_time_that_a_drain_takes_and_the_ports_of_the_image() -> None:
    (document,) = documents(DEPLOY / "compose.yaml")
    service = document["services"]["server"]
    config = ServeConfig.from_toml(
        (DEPLOY / "container.toml").read_text(),
        {name: re.sub(r"\$\{\w+:-(.*)\}", r"\1", value) for name, value in service["environment"].items()},
    )
    needed = config.drain_timeout_ms / 1000 + CUT_TIMEOUT
    assert needed < float(service["stop_grace_period"].removesuffix("s")) <= needed + 10
    assert [port.rsplit(":", 1)[1] for port in service["ports"]] == only("EXPOSE").split()
    assert service["read_only"]
    assert (DEPLOY / service["build"]["context"] / service["build"]["dockerfile"]).resolve() == DEPLOY / "Containerfile"


def test_prometheus_scrapes_the_health_port_of_the_composed_server() -> None:
    (settings,) = documents(DEPLOY / "prometheus.yml")
    (target,) = settings["scrape_configs"][0]["static_configs"][0]["targets"]
    assert target == f"server:{parse_listen(of_image().health_listen, 'health_listen')[1]}"
    assert all((DEPLOY / name).exists() for name in settings["rule_files"])


def test_the_unit_has_the_time_that_a_drain_takes() -> None:
    needed = DEFAULTS.drain_timeout_ms / 1000 + CUT_TIMEOUT
    assert needed < float(unit()["TimeoutStopSec"].removesuffix("s")) <= needed + 10
    assert unit()["KillSignal"] == "SIGTERM"


def test_the_unit_has_files_enough_for_every_connection() -> None:
    assert int(unit()["LimitNOFILE"]) > 2 * DEFAULTS.max_connections


# Proxies


@pytest.mark.parametrize("name", PROXY_FILES)
def test_a_proxy_waits_longer_than_a_server_is_silent(name: str) -> None:
    """An answer that is not streamed: the whole queue, then its computing. A stream: a ping."""
    silence = {
        "haproxy.cfg": r"timeout (?:client|server) (\d+)s",
        "nginx.conf": r"proxy_read_timeout (\d+)s",
        "envoy.yaml": r"stream_idle_timeout: (\d+)s",
    }
    found = [int(seconds) for seconds in re.findall(silence[name], (DEPLOY / name).read_text())]
    assert found
    assert min(found) > 4 * DEFAULTS.queue_deadline_ms / 1000
    assert min(found) > 4 * PING_INTERVAL


@pytest.mark.parametrize("name", PROXY_FILES)
def test_a_proxy_closes_an_idle_connection_before_the_server_does(name: str) -> None:
    kept = {
        "haproxy.cfg": r"option (http-server-close)",
        "nginx.conf": r"    keepalive_timeout (\d+)s",
        "envoy.yaml": r"common_http_protocol_options: {idle_timeout: (\d+)s}",
    }
    (found,) = re.findall(kept[name], (DEPLOY / name).read_text())
    assert not found.isdecimal() or int(found) < DEFAULTS.idle_timeout_ms / 1000


def test_a_proxy_waits_for_a_request_as_long_as_the_server_would() -> None:
    whole = (DEFAULTS.header_timeout_ms + DEFAULTS.body_timeout_ms) / 1000
    assert f"timeout http-request {whole:.0f}s" in (DEPLOY / "haproxy.cfg").read_text()
    assert f"request_timeout: {whole:.0f}s" in (DEPLOY / "envoy.yaml").read_text()
    assert f"client_header_timeout {DEFAULTS.header_timeout_ms // 1000}s" in (DEPLOY / "nginx.conf").read_text()
    assert f"client_body_timeout {DEFAULTS.body_timeout_ms // 1000}s" in (DEPLOY / "nginx.conf").read_text()


def test_every_proxy_keeps_conversations_by_the_same_header_and_asks_readyz() -> None:
    texts = {name: (DEPLOY / name).read_text() for name in PROXY_FILES}
    assert "balance hdr(X-Conversation-Id)" in texts["haproxy.cfg"]
    assert "$http_x_conversation_id" in texts["nginx.conf"]
    assert "header_name: X-Conversation-Id" in texts["envoy.yaml"]
    assert all(_is_route("/readyz") and "/readyz" in texts[name] for name in ("haproxy.cfg", "envoy.yaml"))
