"""docs/models.md is what the registries say."""

from __future__ import annotations

from pathlib import Path

import pytest
import supported_models

from runtime.models.draft_config import DRAFT_FAMILIES
from runtime.models.registry import FAMILIES
from runtime.models.rope_fields import REQUIRED


def test_the_committed_page_is_up_to_date() -> None:
    assert supported_models.main(["--check"]) == 0, "run: python scripts/supported_models.py"


def test_every_registered_name_is_on_the_page() -> None:
    page = supported_models.page()
    for name in (*FAMILIES, *DRAFT_FAMILIES, *REQUIRED):
        assert f"`{name}`" in page


def test_check_finds_a_stale_page_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "models.md"
    page.write_text("# Models\n")
    assert supported_models.main([str(page), "--check"]) == 1
    assert page.read_text() == "# Models\n"
    assert "out of date" in capsys.readouterr().err
    assert supported_models.main([str(page)]) == 0
    assert supported_models.main([str(page), "--check"]) == 0
