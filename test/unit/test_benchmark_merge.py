"""Merging result files: rows keep their origin, the newest row of a key wins, and unrelated files are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from benchmark import machine, merge

MACHINE = {"device": "NVIDIA H200", "gpus": ["NVIDIA H200"], "cores": 16, "python": "3.12", "packages": {"torch": "2.11.0"}}


def row(case: str, at: str, **more: Any) -> dict[str, Any]:
    return {"case": case, "commit": f"c{at}", "command": f"python -m benchmark.memory_limits --cases {case}", "at": at, **more}


def save(file: Path, *rows: dict[str, Any], name: str = "memory_limits", **facts: Any) -> str:
    file.write_text(json.dumps({"name": name, "machine": MACHINE | facts, "rows": rows}))
    return str(file)


def test_merged_rows_keep_their_commit_and_command(tmp_path: Path) -> None:
    into = save(tmp_path / "into.json", row("a", "1"), row("b", "2"))
    assert merge.main([into, save(tmp_path / "x.json", row("c", "3")), save(tmp_path / "y.json", row("d", "1"))]) == 0
    rows = json.loads(Path(into).read_text())["rows"]
    assert [(r["case"], r["commit"]) for r in rows] == [("a", "c1"), ("b", "c2"), ("c", "c3"), ("d", "c1")]
    assert [r["command"].split()[-1] for r in rows] == ["a", "b", "c", "d"]


@pytest.mark.parametrize(("old", "new"), [("2026-01-01", "2026-01-02"), ("2026-01-02", "2026-01-01")])
def test_newest_row_of_a_key_wins(old: str, new: str, tmp_path: Path) -> None:
    into = save(tmp_path / "into.json", row("a", old), row("b", old))
    merge.main([into, save(tmp_path / "x.json", row("a", new))])
    rows = json.loads(Path(into).read_text())["rows"]
    assert [(r["case"], r["at"]) for r in rows] == [("a", max(old, new)), ("b", old)]


def test_new_file_lists_the_packages_of_all_inputs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = save(tmp_path / "y.json", row("b", "1"), packages={"torch": "2.11.0", "transformers": "5.0"})
    into = tmp_path / "new" / "memory_limits.json"
    assert merge.main([str(into), save(tmp_path / "x.json", row("a", "1")), more]) == 0
    assert "2 rows, 2 of them new" in capsys.readouterr().out
    found = json.loads(into.read_text())
    assert (found["name"], len(found["rows"])) == ("memory_limits", 2)
    assert found["machine"]["packages"] == {"torch": "2.11.0", "transformers": "5.0"}


def test_files_of_several_ranks_merge(tmp_path: Path) -> None:
    rows = [{"mode": "plain", "concurrency": c, "at": "1", "command": "x"} for c in (1, 4)]
    into, more = (save(tmp_path / file, row, name="serving_matrix_tp2") for file, row in zip(("into.json", "x.json"), rows, strict=True))
    assert merge.main([into, more]) == 0
    assert [row["concurrency"] for row in json.loads(Path(into).read_text())["rows"]] == [1, 4]


def test_merged_file_has_no_machine_paths(tmp_path: Path) -> None:
    moved = row("a", "1", server_flags="--model-path /data/models/m.gguf --speculative-num-steps 3")
    moved["command"] = "python -m benchmark.x --out /data/out --model /data/models/m.gguf --shapes 3/1/4"
    into = tmp_path / "into.json"
    merge.main([str(into), save(tmp_path / "x.json", moved)])
    (found,) = json.loads(into.read_text())["rows"]
    assert found["command"] == "python -m benchmark.x --model m.gguf --shapes 3/1/4"
    assert found["server_flags"] == "--model-path m.gguf --speculative-num-steps 3"


@pytest.mark.parametrize(
    ("words", "plain"),
    [
        ("x --out /a/b --quick", "x --quick"),
        ("x --out=/a/b --quick", "x --quick"),
        ("x --model=/a/m.gguf", "x --model=m.gguf"),
        ("x --files /a/b,/c/d", "x --files b,d"),
        (f"x --head {machine.ROOT}/benchmark/configs/smollm2-eagle", "x --head benchmark/configs/smollm2-eagle"),
        ("x --shapes 3/1/4 --model benchmark/configs/llama-3-8b", "x --shapes 3/1/4 --model benchmark/configs/llama-3-8b"),
    ],
)
def test_recorded_commands_are_portable(words: str, plain: str) -> None:
    assert machine.portable(words) == plain


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ({"name": "faults"}, "script is 'memory_limits' in one file and 'faults'"),
        ({"device": "NVIDIA H100"}, "device is 'NVIDIA H200' in one file and 'NVIDIA H100'"),
        ({"packages": {"torch": "2.12.0"}}, "torch is '2.11.0' in one file and '2.12.0'"),
        ({"gpus": ["NVIDIA H200"] * 2}, "number of GPUs is 1 in one file and 2"),
    ],
)
def test_unrelated_files_are_refused(other: dict[str, Any], why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    into = Path(save(tmp_path / "into.json", row("a", "1")))
    before = into.read_text()
    assert merge.main([str(into), save(tmp_path / "x.json", row("b", "2"), **other)]) == 1
    assert why in capsys.readouterr().err
    assert into.read_text() == before


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "is not a result file"),
        ("[]", "no name, machine and rows"),
        ('{"name": "guess", "machine": {}, "rows": []}', "is not a script"),
    ],
)
def test_other_files_are_refused(text: str, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "x.json"
    file.write_text(text)
    assert merge.main([str(tmp_path / "into.json"), str(file)]) == 1
    assert why in capsys.readouterr().err
    assert not (tmp_path / "into.json").exists()
