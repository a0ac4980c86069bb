"""The documentation builds as a site without a warning, and its reference is made from the code."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import reference
from eagle_training.kinds import is_held_out_kind

from runtime.config.device_tuning import H200
from runtime.config.flag_parser import flags
from runtime.managers.observers.metrics import COUNTERS, GAUGES

ROOT = Path(__file__).resolve().parents[2]
HELD_OUT = {"recipes", "travel", "comparison", "letters", "poems", "classification"}
"""Kinds of everyday prompts without templates."""


def test_the_reference_has_every_flag_endpoint_and_metric() -> None:
    pages = reference.pages()
    assert all(f"`{flag.spellings[0]}`" in pages["flags.md"] for flag in flags())
    assert all(f"POST {path}`" in pages["endpoints.md"] for path in ("/v1/chat/completions", "/generate", "/v1/messages"))
    assert all(f"`{name}" in pages["metrics.md"] for name, _, _ in (*GAUGES, *COUNTERS))


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    for page in ("index", "serve", "reference/flags", "benchmarks/faults"):
        assert (tmp_path / "site" / f"{page}.html").is_file()
    assert 'src="../benchmark/results/cpu-2/faults.png"' in (tmp_path / "site" / "benchmarks" / "faults.html").read_text()
    assert (tmp_path / "site" / "benchmark" / "results" / "cpu-2" / "faults.png").is_file()


def test_every_named_file_and_link_exists() -> None:
    """Files in backticks, with an extension and a folder, and the targets of relative links; NAME and FAMILY stand for any."""
    pages = [ROOT / "README.md", ROOT / "SECURITY.md", *(ROOT / "docs").glob("*.md")]
    assert [(page.name, name) for page in pages for name in missing(page)] == []


def missing(page: Path) -> list[str]:
    """Files that a page names and that do not exist."""
    text, package = page.read_text(encoding="utf-8"), ROOT / "python" / "runtime"
    named = {name for name in re.findall(r"`([\w./-]+/[\w.-]+\.(?:py|cu|sh|json|yaml|md))`", text) if not re.search("NAME|FAMILY", name)}
    linked = {name for name in re.findall(r"\]\(([^)#\s]+)", text) if not name.startswith("http")}
    folders = (ROOT, package, package / "entrypoints")
    lost = [name for name in named if not any((folder / name).exists() for folder in folders)]
    return lost + [name for name in linked if not (page.parent / name).exists()]


def test_every_endpoint_is_in_the_api_page() -> None:
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    paths = re.findall(r"^## `\w+ (\S+)`", reference.pages()["endpoints.md"], re.MULTILINE)
    lasts = {path.split("}")[-1] or path.split("{")[0] for path in paths}  # behind the id of a response, or before that of a model
    assert len(lasts) > 20
    assert {path for path in lasts if path not in text} == set()


def test_every_named_metric_exists() -> None:
    known = reference.pages()["metrics.md"]
    for page in (ROOT / "docs").glob("*.md"):
        names = re.findall(r"`((?:talon|sglang):[a-z_]+)", page.read_text(encoding="utf-8"))
        assert [(page.name, name) for name in names if name not in known] == []


def test_the_page_of_training_counts_the_prompts_with_a_keyword() -> None:
    lines = (ROOT / "python" / "runtime" / "assets" / "everyday_prompts.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    held_out = [row["prompt"] for row in rows if row["kind"] in HELD_OUT]
    found = sum(map(is_held_out_kind, held_out))
    assert f"{found} of their {len(held_out)} everyday prompts" in " ".join((ROOT / "docs" / "train.md").read_text().split())


def prose(name: str) -> str:
    """A page with single spaces."""
    return " ".join((ROOT / "docs" / name).read_text(encoding="utf-8").split())


def cells(page: str, row: str) -> list[list[str]]:
    """The cells of each line of a generated page that has `row` in its first one."""
    lines = (ROOT / "docs" / "benchmarks" / page).read_text(encoding="utf-8").splitlines()
    split = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    return [found for found in split if re.search(row, found[0])]


def test_figures_in_sentences_are_those_of_the_tables() -> None:
    lengths = {name: cells("grammar.md", rf"^{name}$")[-1][-1] for name in ("free", "schema of records", "schema of one string")}
    said = prose("structured_output.md")
    assert "{schema of one string} tokens an iteration against {free}, and {schema of records} for records".format(**lengths) in said
    *_, memory, seconds = cells("grammar.md", "^49,152 tokens$")[0]
    assert f"takes {float(memory):.0f} MiB with a vocabulary" in prose("operations.md")
    assert f"{float(seconds):.1f} s of CPU time up to" in prose("operations.md")
    shares = [float(ratio) for row in cells("depth_curve.md", "auto / best fixed depth") for ratio in row[1:] if ratio != "-"]
    assert f"{min(shares):.2f} to {max(shares):.2f} times the best fixed depth" in prose("speculation.md")
    shares = [float(ratio) for row in cells("depth_curve.md", "auto / no drafts") for ratio in row[1:] if ratio != "-"]
    assert f"{min(shares):.2f} to {max(shares):.2f} times plain decoding" in prose("speculation.md")
    steps = cells("serving_matrix.md", "^Talon, fa3$")
    assert any(" / 2.65 (" in row[1] for row in steps), "docs/parallelism.md has the time of a plain step on two GPUs"
    shares = [row[7] for row in cells("moe_kernels.md", "^qwen3-30b-a3b$") if row[1] == "16"]
    assert "at 16 it reaches [{} of the roof on an H100 and {} on an H200]".format(*shares) in prose("experiments.md")


def test_the_table_of_exactness_has_the_limits_of_split_attention() -> None:
    (narrow, least), (wide, most) = H200.whole_kv_programs
    *first, last = (f"{a} to {b}" for a, b in H200.split_kv_batches)
    split = ", ".join(
        (
            f"windows of up to {H200.split_kv_width} tokens for {', '.join(first)} and {last} requests",
            f"wider ones up to {H200.split_kv_queries} tokens in all",
            f"windows of up to {narrow} tokens from {least} requests times KV heads on",
            f"and of up to {wide} from {most} on",
        )
    )
    assert f"split-KV runs {split};" in prose("speculation.md")


def test_the_performance_page_stays_short() -> None:
    """Long tables are on the generated pages."""
    assert len((ROOT / "docs" / "performance.md").read_text(encoding="utf-8").splitlines()) <= 250
