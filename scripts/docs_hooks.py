"""mkdocs hooks that add the generated reference, the benchmark results and the pages of all benchmarks to the site."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
RESULTS = "benchmark/results"


def on_config(config: Any) -> Any:
    """List the generated pages of all benchmarks."""
    pages = sorted(path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs" / "benchmarks").glob("*.md"))
    next(part["Benchmarks"] for part in config.nav if "Benchmarks" in part).extend(pages)
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the reference, and the plots and data files that pages link to."""
    sys.path.insert(0, str(ROOT / "scripts"))
    import reference

    for name, text in reference.pages().items():
        files.append(File.generated(config, f"reference/{name}", content=text))
    for path in sorted((ROOT / RESULTS).rglob("*")):
        if path.suffix in (".png", ".json"):
            name = path.relative_to(ROOT).as_posix()
            files.append(File.generated(config, name, content=path.read_bytes()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Adapt links to results: in the repository they are next to docs/, in the site below it."""
    return re.sub(rf"\((?:\.\./)((?:\.\./)*{RESULTS})", r"(\1", markdown)
