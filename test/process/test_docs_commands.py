"""Every command of the documentation runs, or says on its first line what it needs that a test does not have."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import Embedded

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"^(python|pip|curl|bash|docker|mkdocs|kubectl|npm|apt-get)\b", re.MULTILINE)
BLOCKS = [(page.relative_to(ROOT).as_posix(), kind, text) for page in PAGES for kind, text in BLOCK.findall(page.read_text())]
RUN = [(page, text) for page, kind, text in BLOCKS if kind == "bash" and not text.startswith("# Needs ")]


def test_every_block_with_a_command_is_marked_as_one() -> None:
    assert len(RUN) > 10
    assert [(page, text) for page, kind, text in BLOCKS if kind not in ("bash", "python") and COMMAND.search(text)] == []


@pytest.mark.parametrize(("page", "text"), RUN, ids=[page for page, _ in RUN])
def test_the_commands_of_a_block_run(page: str, text: str, embedded: Embedded, tmp_path: Path) -> None:
    """Servers are checked, not started: the one at port 30000 runs already, on another port."""
    script = text.replace("http://127.0.0.1:30000", embedded.url).replace("curl ", "curl --fail-with-body -sS ")
    script = re.sub(r"(runtime\.launch_server)(?! --check| --dump-config)", r"\1 --check", script)
    script = re.sub(r"\bpython (scripts/\S+)", rf"python {ROOT}/\1", script)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PYTHONPATH": str(ROOT / "python"), "PATH": path}
    done = subprocess.run(["bash", "-euc", script], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"{page}:\n{script}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"


def test_the_python_of_the_pages_runs(embedded: Embedded, tmp_path: Path) -> None:
    blocks = [text for _, kind, text in BLOCKS if kind == "python"]
    assert blocks
    for text in blocks:
        env = {**os.environ, "PYTHONPATH": str(ROOT / "python")}
        script = text.replace("http://127.0.0.1:30000", embedded.url)
        done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, f"{text}\n{done.stderr}"
