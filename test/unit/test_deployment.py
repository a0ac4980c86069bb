"""The container, the compose file, the Kubernetes manifests and the systemd unit are well-formed and agree with the server."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from runtime.config.flag_parser import parse
from runtime.entrypoints.http.auth import OPEN_PATHS

ROOT = Path(__file__).resolve().parents[2]
BOARD = json.loads((ROOT / "docker" / "grafana" / "dashboards" / "talon.json").read_text())
MANIFESTS = [one for file in sorted((ROOT / "deploy" / "kubernetes").glob("*.yaml")) for one in yaml.safe_load_all(file.read_text())]


def run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_dockerfile_has_no_findings() -> None:
    run(str(Path(sys.executable).parent / "hadolint"), str(ROOT / "docker" / "Dockerfile"))


def test_the_container_is_unprivileged_and_gets_what_it_copies() -> None:
    lines = (ROOT / "docker" / "Dockerfile").read_text().splitlines()
    stages = [line.split()[-1] for line in lines if line.startswith("FROM")]
    assert stages[-2:] == ["cuda", "cpu"]
    assert lines.count("USER 10001") == 2
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = {name.removeprefix("./") for line in lines if line.startswith("COPY p") for name in line.split()[1:-1]}
    assert copied == allowed
    assert all((ROOT / name).exists() for name in copied)


def test_compose_mounts_what_exists_and_nothing_can_be_written() -> None:
    compose = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())
    services = compose["services"]
    assert services["talon"]["read_only"] is True
    mounts = [mount.split(":") for service in services.values() for mount in service["volumes"]]
    assert all((ROOT / "docker" / source).exists() if source.startswith(".") else source in compose["volumes"] for source, *_ in mounts)
    scraped = yaml.safe_load((ROOT / "docker" / "prometheus.yml").read_text())["scrape_configs"][0]["static_configs"][0]["targets"]
    assert scraped == ["talon:30000"]
    gpu = yaml.safe_load((ROOT / "docker" / "compose.cuda.yaml").read_text())["services"]
    assert gpu.keys() <= services.keys()


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda one: one["kind"])
def test_manifests_follow_the_schemas_of_kubernetes(manifest: dict[str, Any]) -> None:
    kubernetes_validate.validate(manifest, "1.33", strict=True)


def test_probes_flags_and_grace_agree_with_the_server() -> None:
    spec = next(one for one in MANIFESTS if one["kind"] == "Deployment")["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    probes = {name: container[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "liveness", "readiness")}
    assert probes == {"startup": "/ready", "liveness": "/health", "readiness": "/ready"}
    assert set(probes.values()) <= OPEN_PATHS
    pause = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert spec["terminationGracePeriodSeconds"] > parse(container["args"]).args.shutdown_timeout + pause
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert container["securityContext"]["readOnlyRootFilesystem"] is True


def test_the_number_of_replicas_is_left_to_the_autoscaler() -> None:
    scaler = next(one for one in MANIFESTS if one["kind"] == "HorizontalPodAutoscaler")["spec"]
    scaled = next(one for one in MANIFESTS if one["kind"] == "Deployment")
    assert scaler["scaleTargetRef"]["name"] == scaled["metadata"]["name"]
    assert "replicas" not in scaled["spec"]


def test_a_node_with_the_only_replica_can_be_drained() -> None:
    budget = next(one for one in MANIFESTS if one["kind"] == "PodDisruptionBudget")["spec"]
    assert budget["maxUnavailable"] == 1
    assert "minAvailable" not in budget


def test_the_systemd_unit_is_valid(tmp_path: Path) -> None:
    if (analyze := shutil.which("systemd-analyze")) is None:
        pytest.skip("systemd is not installed")
    unit = tmp_path / "talon.service"
    unit.write_text((ROOT / "deploy" / "talon.service").read_text().replace("/opt/talon/bin/python", sys.executable))
    run(analyze, "verify", str(unit))


def test_the_board_takes_any_prometheus() -> None:
    data_source, model = BOARD["templating"]["list"]
    assert (data_source["name"], data_source["type"], data_source["query"]) == ("datasource", "datasource", "prometheus")
    readers = [model, *BOARD["panels"], *(target for panel in BOARD["panels"] for target in panel["targets"])]
    assert {reader["datasource"]["uid"] for reader in readers} == {"${datasource}"}


def test_panels_of_the_board_do_not_overlap() -> None:
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in BOARD["panels"]]
    assert len(places) == len(set(places)) == 12
    assert all(panel["targets"] for panel in BOARD["panels"])
