"""schemathesis, driven by /openapi.json, finds nothing: no server error, no undocumented answer, nothing wrongly accepted or refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import fake

TEMPLATE = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
EXAMPLES = os.environ.get("TALON_FUZZ_EXAMPLES", "6")


def test_schemathesis_finds_nothing(tmp_path: Path) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text(TEMPLATE)
    flags = ("--chat-template", str(template), "--profile", str(tmp_path))
    with fake.serving(fake.dummy_model(tmp_path / "model"), *flags, behaviour="robust") as server:
        command = [sys.executable, "-m", "schemathesis.cli", "--config-file", str(fake.ROOT / "schemathesis.toml")]
        command += ["run", f"{server.url}/openapi.json", "--seed", "1", "--max-examples", EXAMPLES, "--phases", "fuzzing,stateful"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
