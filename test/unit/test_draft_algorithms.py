"""The table of drafting algorithms, and the registry of their drafters."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from pkgutil import resolve_name
from typing import get_args

import pytest

from runtime.config.draft_algorithms import ALGORITHM_CAPS, DraftFormat, SpecAlgorithm
from runtime.config.server_args import ServerArgs
from runtime.model_executor.build import build_worker
from runtime.model_executor.drafter import NoDrafter
from runtime.models.draft_config import READERS
from runtime.speculative.registry import make_drafter
from unit.predicting import speculating
from unit.tiny import tiny_model, tiny_runtime, tiny_speculative

DOCS = Path(__file__).parents[2] / "docs"
FLAGS = {field.name for field in fields(ServerArgs)}


def test_every_algorithm_has_a_drafter_and_a_line_in_the_docs() -> None:
    for caps in ALGORITHM_CAPS.values():
        assert callable(resolve_name(caps.drafter))
    for page in ("speculation.md", "models.md"):
        lines = [line for line in (DOCS / page).read_text().splitlines() if line.startswith("| `")]
        assert [name for name in ALGORITHM_CAPS if not any(f"`{name}`" in line for line in lines)] == []


def test_every_format_of_a_draft_has_a_reader_and_an_algorithm() -> None:
    formats = {caps.draft for caps in ALGORITHM_CAPS.values() if caps.has_folder}
    assert set(READERS) == formats == set(get_args(DraftFormat))


@pytest.mark.parametrize("name", ALGORITHM_CAPS)
def test_a_row_is_consistent(name: SpecAlgorithm) -> None:
    caps = ALGORITHM_CAPS[name]
    assert set(caps.unused_flags) <= FLAGS
    assert bool(caps.unused_flags) == bool(caps.unused_why)
    assert ("speculative_draft_model_path" in caps.unused_flags) == (not caps.has_folder)
    if caps.without_folder is not None:
        assert caps.has_folder
        assert not ALGORITHM_CAPS[caps.without_folder].has_folder


@pytest.mark.parametrize("name", ["EAGLE", "EAGLE3", "DFLASH", "STANDALONE", "NGRAM"])
def test_only_drafters_with_a_model_have_graph_runners(tmp_path: Path, name: SpecAlgorithm) -> None:
    drafter = speculating(tmp_path, name).parts.drafter
    assert bool(drafter.models()) == (ALGORITHM_CAPS[name].draft != "none")


def test_without_an_algorithm_there_are_no_drafts() -> None:
    assert isinstance(build_worker(tiny_runtime(), tiny_model(), make_drafter).parts.drafter, NoDrafter)


def test_drafts_are_never_left_out_silently() -> None:
    with pytest.raises(AssertionError, match="make_drafter"):
        build_worker(tiny_runtime(tiny_speculative("", algorithm="NGRAM")), tiny_model())
