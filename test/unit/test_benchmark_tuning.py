"""The kernel tuning tools on a CPU: flags, candidate configurations and cases, roofs, and result files."""

from __future__ import annotations

import importlib
import json
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
import torch
from benchmark import machine, shapes
from benchmark.machine import ROOT
from benchmark.record import RESULTS, Record
from benchmark.report import SCRIPTS
from benchmark.sweep import numbers
from benchmark.tuning import (
    attention_backends,
    decode_step,
    experts,
    gemms,
    latent_attention,
    scaled_gemms,
    split_attention,
    step_choices,
    world,
)
from benchmark.tuning.split_attention import Case

from runtime.config.kernel_configs import SplitConfig

CPU = torch.device("cpu")
RATE = 4.32e12
TOOLS = (attention_backends, decode_step, experts, gemms, latent_attention, scaled_gemms, split_attention, step_choices)
MEASURED = RESULTS / "nvidia-h200" / "tuning" / "split_attention.json"


# ---- command lines


def test_every_tool_is_listed_and_separate_from_report_scripts() -> None:
    import benchmark.tuning as package

    runnable = {file.stem for file in Path(package.__path__[0]).glob("*.py") if "__main__" in file.read_text(encoding="utf-8")}
    assert runnable == {tool.__name__.rpartition(".")[2] for tool in TOOLS}
    assert package.__doc__ is not None
    assert all(f"- `{name}`" in package.__doc__ for name in runnable)
    assert not runnable & set(SCRIPTS)


@pytest.mark.skipif(torch.cuda.is_available(), reason="requires a machine without a GPU")
@pytest.mark.parametrize("tool", TOOLS)
def test_tool_without_gpu_prints_one_line(tool: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as refused:
        tool.main(["--out", str(tmp_path)])
    assert str(refused.value) == f"python -m {tool.__name__}: a CUDA GPU is required, and torch finds none"
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("tool", "flags"),
    [
        (gemms, ["--rows", "1,0"]),
        (experts, ["--rows", "0"]),
        (scaled_gemms, ["--rows", "x"]),
        (decode_step, ["--batch-sizes", "few"]),
        (step_choices, ["--rows", "few"]),
        (attention_backends, ["--pages", ""]),
        (latent_attention, ["--heads", "0"]),
        (split_attention, ["--widths", "-1"]),
        (split_attention, ["--pages", "48"]),
        (split_attention, ["--ragged", "some"]),
    ],
)
def test_bad_flags_are_named(tool: ModuleType, flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        tool.main(flags)
    assert refused.value.code == 2
    assert f"argument {flags[0]}: " in capsys.readouterr().err


@pytest.mark.parametrize("tool", TOOLS)
def test_help_shows_purpose_and_command(tool: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        tool.main(["--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert f"PYTHONPATH=python python -m {tool.__name__}" in shown
    assert "--out" in shown


def test_counts_start_at_one() -> None:
    assert numbers("1,4,16") == [1, 4, 16]
    assert numbers("none") == []


@pytest.mark.parametrize(
    ("script", "command"),
    [
        (ROOT / "benchmark" / "tuning" / "gemms.py", "python -m benchmark.tuning.gemms --rows 1"),
        (ROOT / "benchmark" / "modes.py", "python -m benchmark.modes --rows 1"),
        (Path("elsewhere") / "pytest.py", "python -m benchmark.pytest --rows 1"),
    ],
)
def test_recorded_command_names_the_package(script: Path, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", [str(script), "--rows", "1", "--out", "folder"])
    assert machine.command() == command


@pytest.mark.parametrize("tool", TOOLS)
def test_tuning_results_have_their_own_folder(tool: ModuleType, tmp_path: Path) -> None:
    record = Record(tool.NAME, ("x",), tmp_path)
    record.add({"x": 1})
    (file,) = tmp_path.glob("*/tuning/*.json")
    written = json.loads(file.read_text())
    assert (file.stem, written["machine"]) == (tool.__name__.rpartition(".")[2], machine.describe())
    assert {"commit", "command", "at"} <= set(written["rows"][0])


# ---- what is timed


def test_weights_have_the_8b_shapes() -> None:
    sizes = {name: 2 * rows * columns for name, (rows, columns) in world.WEIGHTS.items()}
    assert sizes.pop("head") == world.SHAPE.head_bytes
    assert sum(sizes.values()) == world.SHAPE.layer_bytes
    assert {gemm.name: gemm.weight_bytes for gemm in gemms.GEMMS} == sizes | {"head": world.SHAPE.head_bytes}


def test_roof_needs_a_measured_bandwidth() -> None:
    assert shapes.read_rate({"gpus": ["NVIDIA H200"], "device": "NVIDIA H200"}) == RATE
    assert shapes.read_rate({"gpus": [], "cores": 2}) is None
    assert world.attention_roof_us(8, 1250, None) is None
    assert world.attention_roof_us(8, 1250, RATE) == pytest.approx(2 * 2 * 8 * 1250 * 8 * 128 / RATE * 1e6)


@pytest.mark.parametrize("page_size", [1, 16])
def test_requests_of_a_batch_own_disjoint_slots(page_size: int) -> None:
    size, width, length = 3, 4, 50
    shape, pool, table = world.attention_world(size, width, length, page_size, 2, CPU)
    batch = world.decode_batch(size, width, length, CPU)
    positions = torch.arange(length).expand(size, length)
    slots = table.slots(batch.req_pool_indices[:, None].expand(size, length), positions).flatten()
    assert len(set(slots.tolist())) == size * length
    assert page_size <= int(slots.min()) <= int(slots.max()) < pool.k[0].shape[0] * page_size
    assert len(pool.k) == len(shape.layers) == 2
    assert batch.positions.tolist() == [46, 47, 48, 49] * size
    assert batch.seq_lens.tolist() == [length] * size
    assert batch.qo_indptr.tolist() == [0, 4, 8, 12]
    assert shape.max_context_len >= length


def test_random_weight_preserves_the_scale() -> None:
    weight = world.linear("o", CPU).weight
    assert tuple(weight.shape) == world.WEIGHTS["o"]
    out = torch.randn(4, weight.shape[1]) @ weight.float().T
    assert float(out.std()) == pytest.approx(1.0, rel=0.1)


# ---- GEMMs


@pytest.mark.parametrize("gemm", gemms.GEMMS, ids=lambda gemm: gemm.name)
@pytest.mark.parametrize("padded", [{False: 16, True: 8}, {False: 128, True: 128}], ids=["few", "many"])
def test_candidates_fit_shared_memory_and_are_unique(gemm: gemms.Gemm, padded: dict[bool, int]) -> None:
    found = [*gemms.candidates(gemm, padded)]
    assert len(set(found)) == len(found) > 0
    assert {config[0] for config in found} == set(gemm.tiles)
    for block_n, block_k, _, stages, swap, _ in found:
        weights, inputs = 2 * stages * block_k * block_n, 2 * stages * block_k * padded[swap]
        assert weights + inputs <= 232448, "the shared-memory limit of a thread block on Hopper"
    left_out = sum(len(depths) for block_n, _, _, depths in gemms.TILES if block_n in gemm.tiles) * 4 - len(found)
    assert left_out > 0 or padded[False] == 16, "some candidates for many rows do not fit"


@dataclass(frozen=True)
class Cut:
    name: str
    swap: bool = False
    tma: bool = False
    prefetch: int = 1024
    late: bool = False

    def __str__(self) -> str:
        return self.name


TIMES = {None: 9.0, Cut("a"): 8.0, Cut("b"): 7.126, Cut("c", swap=True, tma=True): 7.5, Cut("d", prefetch=0): 6.0, Cut("e", late=True): 6.5}


def test_best_lists_the_fastest_candidates_without_cublas() -> None:
    assert [str(config) for config in gemms.best(TIMES, 3)] == ["d", "e", "b"]
    assert gemms.best({None: 1.0}, 3) == []


def test_kinds_are_compared_without_prefetch() -> None:
    assert gemms.kinds(TIMES) == "cuBLAS 9.0; plain 7.1 (b); swap tma 7.5 (c)"


def test_gemm_row_lists_all_times_fastest_first() -> None:
    gemm = gemms.GEMMS[1]
    row = gemms.row(gemm, 4, TIMES, RATE)
    assert [*row["us"].items()] == [("d", 6.0), ("e", 6.5), ("b", 7.13), ("c", 7.5), ("a", 8.0), ("cuBLAS", 9.0)]
    assert row["roof_us"] == round(2 * 4096 * 4096 / RATE * 1e6, 2)
    assert (row["gemm"], row["rows"]) == ("o", 4)
    assert "roof_us" not in gemms.row(gemm, 4, TIMES, None)


def test_candidates_are_valid_kernel_configurations() -> None:
    pytest.importorskip("triton")
    from runtime.layers.gemm.triton_gemm import padded_rows

    for gemm in gemms.GEMMS:
        for rows in (1, 16, 128):
            configs = gemms.configs(gemm, rows)
            assert len({str(config) for config in configs}) == len(configs), "rows identify candidates by their text"
            for c in configs:
                assert c.stages * c.block_k * 2 * (c.block_n + padded_rows(rows, c.swap)) <= gemms.SHARED_MEMORY


# ---- steps and backends


def test_step_roof_counts_layers_and_kv() -> None:
    case = decode_step.Case(2, "fa3", 4, 4, 1000)
    layers, head = 2 * world.SHAPE.layer_bytes, world.SHAPE.head_bytes
    keys = 2 * 4 * 1000 * 2 * 2 * world.G * world.D
    assert case.roof_us(RATE) == pytest.approx((layers + head + keys) / RATE * 1e6)
    assert case.rows == 16


def test_rows_have_keys_and_a_roof_if_known() -> None:
    step = decode_step.Case(32, "fa3", 1, 1, 2000)
    row = step.row(True, {"all": 3999.96}, {"linear 4096x4096": "cuBLAS"}, RATE)
    assert set(decode_step.KEYS) <= set(row)
    assert (row["us"], row["pdl"]) == ({"all": 4000.0}, True)
    assert row["roof_us"] == round(step.roof_us(RATE) or 0.0, 1) == 3535.1
    assert "roof_us" not in step.row(True, {"all": 1.0}, {}, None)
    backend = attention_backends.Case("fa3", 16, 4, 8, 2000)
    assert backend.row(20.123, RATE) == {**backend._asdict(), "us": 20.12, "roof_us": 15.17}
    assert "roof_us" not in backend.row(20.123, None)


# ---- split attention


def asked(*flags: str) -> list[Case]:
    args: Namespace = split_attention.parser().parse_args(flags)
    return split_attention.cases(args)


def test_single_request_is_not_ragged() -> None:
    flags = ("--pages", "1,64", "--widths", "1", "--batch-sizes", "1,8", "--lengths", "100")
    alike = [Case(page, 1, batch, 100, False) for page in (1, 64) for batch in (1, 8)]
    assert set(asked(*flags, "--ragged", "none")) == set(alike)
    assert set(asked(*flags, "--ragged", "200")) == {*alike, Case(1, 1, 8, 200, True), Case(64, 1, 8, 200, True)}


@pytest.mark.parametrize("ragged", [False, True])
def test_lengths_have_the_requested_mean_and_maximum(ragged: bool) -> None:
    case = Case(64, 1, 16, 1200, ragged)
    lens = case.lens(CPU)
    assert lens.dtype is torch.int32
    assert float(lens.float().mean()) == pytest.approx(1200, abs=1)
    assert int(lens.max()) == case.longest
    assert int(lens.min()) == (300 if ragged else 1200)
    assert case.slots % 64 == 0
    assert case.slots >= case.batch * case.longest


def test_cases_leave_a_fifth_of_the_memory_free() -> None:
    small, large = Case(64, 1, 1, 64, False), Case(64, 1, 2, 64, False)
    needed = world.SHAPE.kv_bytes_per_token * 128
    assert split_attention.that_fit([small, large], needed * 5 // 4) == [small, large]
    assert split_attention.that_fit([small, large], needed) == [small]


def test_wrong_attention_result_stops_the_run() -> None:
    want = [torch.randn(6, 4, 8) for _ in range(2)]
    case = Case(64, 1, 6, 100, False)
    split_attention.compare("near", case, [t * 1.01 for t in want], want)
    off = want[1].clone()
    off[5, 3] *= 1.05
    for got in (off, torch.full_like(off, float("nan"))):
        with pytest.raises(SystemExit, match=r"^far differs from FA3 for Case\(page=64"):
            split_attention.compare("far", case, [want[0], got], want)


def test_committed_results_have_the_written_format() -> None:
    measured = json.loads(MEASURED.read_text(encoding="utf-8"))
    assert measured["name"] == split_attention.NAME
    assert len(measured["rows"]) == 48
    for old in measured["rows"]:
        case = Case(*(old[name] for name in Case._fields))
        new = split_attention.row(case, {"FA3": old["FA3 us"], **old["split us"]}, RATE)
        assert old["split us"][old["best"]] == min(old["split us"].values()), "several may be the best of the rounded times"
        assert new | {name: old[name] for name in ("best", "commit", "command", "at")} == old


def test_choice_shows_minimum_and_mean_by_width_and_batch() -> None:
    times = [(Case(page, 1, 8, 100, ragged), fa3) for page, ragged, fa3 in ((1, False, 10.0), (64, False, 30.0), (64, True, 20.0))]
    rows = [split_attention.row(case, {"FA3": fa3, "x": 20.0, "y": 10.0}, RATE) for case, fa3 in times]
    rows.append(split_attention.row(Case(64, 4, 8, 100, False), {"FA3": 40.0, "x": 20.0, "y": 50.0}, None))
    assert split_attention.choice(rows, "x") == ["FA3's time / that of x: minimum, mean", "q 1 B  8: 0.50 1.00", "q 4 B  8: 2.00 2.00"]
    assert split_attention.line(rows[2]).endswith("~: roof    0.8 FA3   20.0 |   20.0   10.0 | 2.00x y")
    assert split_attention.line(rows[3]).endswith(" : FA3   40.0 |   20.0   50.0 | 2.00x x")


def test_split_attention_candidates_are_valid_configurations() -> None:
    found = split_attention.configs()
    assert found["128x3 1/SM"] == SplitConfig(128, 4, 3, 1, alone=2)
    assert found["64x3 3/SM scheduled"] == SplitConfig(64, 4, 3, 3, scheduled=True)
    assert found["64x4 whole"] == SplitConfig(64, 4, 4, 2, whole=True)
    assert len(set(found.values())) == len(found)


def test_measured_configurations_are_still_candidates() -> None:
    measured = json.loads(MEASURED.read_text(encoding="utf-8"))
    assert {name for row in measured["rows"] for name in row["split us"]} == set(split_attention.CONFIGS)


@pytest.mark.parametrize("tool", TOOLS)
def test_tool_name_matches_its_module(tool: ModuleType) -> None:
    assert importlib.import_module(f"benchmark.{tool.NAME.replace('/', '.')}") is tool
