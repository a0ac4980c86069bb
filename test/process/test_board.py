"""Every query of the Grafana board returns data from a real Prometheus that scrapes a real server."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest
import yaml
from benchmark.ports import free_port
from benchmark.server import Server
from benchmark.shapes import tiny_model

ROOT = Path(__file__).resolve().parents[2]
BOARD = json.loads((ROOT / "docker" / "grafana" / "dashboards" / "talon.json").read_text())
SECONDS = 60.0
BODY = {"prompt": [5, 6, 7, 8], "max_tokens": 16, "ignore_eos": True, "stream": True}


@contextmanager
def prometheus(path: str, target: int, folder: Path) -> Iterator[str]:
    """Prometheus with the configuration of docker/, scraping a port of this machine every half second."""
    config = yaml.safe_load((ROOT / "docker" / "prometheus.yml").read_text())
    config["global"]["scrape_interval"] = "500ms"
    config["scrape_configs"][0]["static_configs"][0]["targets"] = [f"127.0.0.1:{target}"]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    address = f"127.0.0.1:{free_port()}"
    flags = [f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data", f"--web.listen-address={address}"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([path, *flags], stdout=log, stderr=subprocess.STDOUT)
    try:
        wait_until_ready(f"http://{address}")
        yield f"http://{address}"
    finally:
        process.kill()
        process.wait()


def wait_until_ready(url: str) -> None:
    """Until Prometheus answers queries: at first it refuses connections, then it answers 503."""
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        with suppress(httpx.TransportError):
            if httpx.get(f"{url}/-/ready", verify=False).status_code == 200:
                return
        time.sleep(0.1)
    raise AssertionError("Prometheus is not ready")


def queries() -> list[str]:
    """The expressions of all panels, as Grafana would send them."""
    expressions = [target["expr"] for panel in BOARD["panels"] for target in panel["targets"]]
    return [text.replace("$__rate_interval", "20s").replace("$model", ".*") for text in expressions]


def values(url: str, query: str) -> list[float]:
    """What Prometheus answers now; NaN is left out."""
    answer = httpx.get(f"{url}/api/v1/query", params={"query": query}, verify=False).json()
    assert answer["status"] == "success", (query, answer)
    found = [float(one["value"][1]) for one in answer["data"]["result"]]
    return [value for value in found if value == value]


def test_every_query_of_the_board_has_data(tmp_path: Path) -> None:
    path = shutil.which("prometheus")
    if path is None:
        pytest.skip("no Prometheus on this machine; the package `prometheus` brings it")
    model = tiny_model()
    with Server([*model.target_flags, *model.eagle_flags("2.0")]) as server, prometheus(path, server.port, tmp_path) as url:
        deadline, missing = time.monotonic() + SECONDS, queries()
        while missing and time.monotonic() < deadline:
            for _ in range(4):
                httpx.post(f"http://127.0.0.1:{server.port}/v1/completions", json=BODY, verify=False).raise_for_status()
            missing = [query for query in missing if not values(url, query)]
    assert missing == []
