"""The memory that a control group leaves, and starts that it cannot hold."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from tiny import tiny_model, tiny_runtime

from runtime.config.host_memory import MIB, HostMemory, host_memory
from runtime.config.quant_config import Int4Format, QuantConfig
from runtime.entrypoints.memory_check import PROCESSES, SERVING, check_memory, needed_bytes
from runtime.errors import ConfigError

UNLIMITED_V1 = str(0x7FFFFFFFFFFFF000)


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = SimpleNamespace(total=16 << 30, available=12 << 30)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)


def group(folder: Path, **files: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(f"{text}\n")
    return folder


def measured(root: Path, membership: str) -> HostMemory:
    (root / "membership").write_text(membership)
    return host_memory(root / "cgroups", root / "membership")


def test_without_a_limit_the_machine_counts(tmp_path: Path) -> None:
    group(tmp_path / "cgroups/a", memory__max="max", memory__current=100 * MIB)
    assert measured(tmp_path, "0::/a\n") == HostMemory(16 << 30, 12 << 30)
    assert host_memory(tmp_path / "none", tmp_path / "none") == HostMemory(16 << 30, 12 << 30)


@pytest.mark.parametrize("limit", [700, 1200, 2000])
def test_a_limit_of_version_2_counts_without_the_page_cache(tmp_path: Path, limit: int) -> None:
    stat = f"anon {200 * MIB}\ninactive_file {60 * MIB}\nactive_file {40 * MIB}"
    inner = group(tmp_path / "cgroups/a/b", memory__max=limit * MIB, memory__current=300 * MIB, memory__stat=stat)
    memory = measured(tmp_path, "0::/a/b\n")
    assert memory == HostMemory(limit * MIB, (limit - 200) * MIB, inner)
    assert str(inner) in memory.source


@pytest.mark.parametrize("limit", [700, 1200, 2000])
def test_a_limit_of_version_1_counts(tmp_path: Path, limit: int) -> None:
    stat = f"cache 1\ninactive_file 7\ntotal_cache {90 * MIB}\ntotal_inactive_file {50 * MIB}\ntotal_active_file {40 * MIB}"
    inner = group(tmp_path / "cgroups/memory/x", memory__limit_in_bytes=limit * MIB, memory__usage_in_bytes=190 * MIB, memory__stat=stat)
    group(tmp_path / "cgroups/memory", memory__limit_in_bytes=UNLIMITED_V1, memory__usage_in_bytes=1 << 30)
    assert measured(tmp_path, "5:cpu:/\n4:memory:/x\n0::/\n") == HostMemory(limit * MIB, (limit - 100) * MIB, inner)


def test_the_tightest_of_nested_groups_counts(tmp_path: Path) -> None:
    group(tmp_path / "cgroups/a/b", memory__max=2000 * MIB, memory__current=100 * MIB)
    outer = group(tmp_path / "cgroups/a", memory__max=3000 * MIB, memory__current=2500 * MIB)
    assert measured(tmp_path, "0::/a/b\n") == HostMemory(3000 * MIB, 500 * MIB, outer)


def test_a_container_sees_its_group_as_the_root(tmp_path: Path) -> None:
    root = group(tmp_path / "cgroups", memory__max=1200 * MIB, memory__current=0)
    assert measured(tmp_path, "0::/\n") == HostMemory(1200 * MIB, 1200 * MIB, root)
    assert measured(tmp_path, "0::/not/visible/inside\n") == HostMemory(1200 * MIB, 1200 * MIB, root)


def test_a_start_that_does_not_fit_names_the_memory_that_it_needs() -> None:
    config, model = tiny_runtime(), tiny_model()
    needed = needed_bytes(config, model)
    assert needed >= PROCESSES + SERVING
    check_memory(config, model, HostMemory(needed, needed))
    with pytest.raises(ConfigError, match=rf"needs at least {-(-needed // MIB):,} MiB .* control group /x"):
        check_memory(config, model, HostMemory(100 * MIB, 1 * MIB, Path("/x")))


def test_weights_count_as_they_are_stored(tmp_path: Path) -> None:
    model = tiny_model(dtype="float32", vocab_size=1000, hidden_size=100)
    (tmp_path / "model.safetensors").write_bytes(bytes(4_000_000))
    size = {kind: needed_bytes(tiny_runtime(model_path=str(tmp_path), **kind_of), model) for kind, kind_of in {
        "float32": {}, "bfloat16": {"dtype": "bfloat16"}, "int8": {"quantization": "int8"}, "int4": {"quantization": "int4"},
    }.items()}  # fmt: skip
    assert size["float32"] - size["bfloat16"] >= 2_000_000
    assert size["float32"] - size["int8"] == 4_000_000 - (900_000 + 500_000)
    assert size["int4"] - size["int8"] == 900_000 // 4
    packed, dense = (replace(model, quant=quant) for quant in (QuantConfig("int4", int4=Int4Format("awq", 128)), QuantConfig("fp8")))
    stored = needed_bytes(tiny_runtime(model_path=str(tmp_path)), dense)
    assert needed_bytes(tiny_runtime(model_path=str(tmp_path)), packed) - stored == 4_000_000 - 2 * 2 * 100_000, "two forms of int4"
