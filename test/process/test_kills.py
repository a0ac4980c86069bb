"""A killed process, in every phase: the exit status says so, and nothing is left."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from process.fake import dummy_model
from process.kill_rounds import PHASES, VICTIMS, Phase, Victim, kill


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("victim", VICTIMS)
def test_a_kill_ends_the_server_with_a_failure(tmp_path: Path, victim: Victim, phase: Phase) -> None:
    outcome = kill(dummy_model(tmp_path / "tiny"), victim, phase, random.Random(f"{victim} {phase}"))
    assert outcome.clean, outcome
