"""Making a trained head the embedded model's own: what is refused, what is copied, and the table of its acceptance."""

from __future__ import annotations

import json
from pathlib import Path

import install_head
import pytest
from eagle_training.evaluation import NO_TEMPLATES, TEMPLATES

ROW = {"device": "cuda", "dtype": "bfloat16", "machine": "a GPU", "commit": "abc", "new_tokens": 256}


def rows() -> list[dict[str, object]]:
    found = []
    for shape, more in (("3/1/4", 0.0), ("5/1/6", 0.5)):
        for name, kinds in (
            (NO_TEMPLATES, {"recipes": 2.5, "travel": 2.3}),
            (TEMPLATES, {"code": 2.6, "lists": 2.4}),
            ("held-out", {"held-out": 2.7}),
        ):
            lengths = {kind: length + more for kind, length in kinds.items()}
            found.append(ROW | {"shape": shape, "set": name, "accept_length": 2.4 + more, "accept_length_without_loops": 2.2 + more,
                                "accept_length_by_kind": lengths})  # fmt: skip
    return [*found, found[0] | {"device": "cpu"}]


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    head, docs = tmp_path / "head", tmp_path / "train.md"
    head.mkdir()
    docs.write_text(f"before\n{install_head.BEGIN}old\n{install_head.END}after\n")
    monkeypatch.setattr(install_head, "EMBEDDED_DRAFT", head)
    monkeypatch.setattr(install_head, "DOCS", docs)
    return head, docs


def write_results(folder: Path) -> Path:
    folder.mkdir()
    for name in install_head.FILES:
        (folder / name).write_text("{}")
    (folder / "evaluation.json").write_text(json.dumps(rows()))
    return folder


def test_a_head_and_its_table_are_installed(tmp_path: Path, places: tuple[Path, Path]) -> None:
    head, docs = places
    install_head.main([str(write_results(tmp_path / "results"))])
    assert {path.name for path in head.iterdir()} == set(install_head.FILES)
    text = docs.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    lines = ["| recipes | 2.50 | 3.00 |", "| lists | 2.40 | 2.90 |"]
    lines.append(f"| **{NO_TEMPLATES}** | 2.40 (2.20) | 2.90 (2.70) |")
    for line in lines:
        assert line in text.splitlines()
    install_head.main(["--check"])
    docs.write_text(text.replace("2.50", "2.51"))
    with pytest.raises(SystemExit, match="out of date"):
        install_head.main(["--check"])


def test_an_incomplete_or_large_head_is_refused(tmp_path: Path, places: tuple[Path, Path]) -> None:
    results = write_results(tmp_path / "results")
    (results / "model.safetensors").write_bytes(bytes(install_head.MAX_BYTES))
    with pytest.raises(SystemExit, match="the limit is 24,000,000"):
        install_head.main([str(results)])
    (results / "run.json").unlink()
    with pytest.raises(SystemExit, match=r"lacks run\.json"):
        install_head.main([str(results)])
    assert not list(places[0].iterdir())


def test_the_table_in_the_docs_is_that_of_the_shipped_head() -> None:
    install_head.main(["--check"])
