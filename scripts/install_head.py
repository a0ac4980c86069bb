"""Install a trained head as the embedded model's draft head, and write its acceptance by kind of prompt into docs/train.md.

python scripts/install_head.py RESULTS   # a folder that train_eagle.py wrote
python scripts/install_head.py           # only the table, from the installed head
python scripts/install_head.py --check   # fail if the table is out of date
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "python"), str(ROOT)]

from eagle_training.model_card import unseen_kinds  # noqa: E402

from runtime.config.speculative import EMBEDDED_DRAFT  # noqa: E402

DOCS = ROOT / "docs" / "train.md"
BEGIN, END = "<!-- acceptance: scripts/install_head.py -->\n", "<!-- acceptance: end -->\n"
FILES = ("config.json", "model.safetensors", "README.md", "evaluation.json", "training.json", "run.json", "held_out.jsonl", "curves.png")
MAX_BYTES = 24_000_000


def acceptance(rows: list[dict[str, Any]], run: dict[str, Any]) -> str:
    """Accept lengths by kind as Markdown, of a GPU if one was measured, else of the CPU."""
    device = "cuda" if any(row["device"] == "cuda" for row in rows) else "cpu"
    rows = [row for row in rows if row["device"] == device]
    shapes = list(dict.fromkeys(row["shape"] for row in rows))
    lines = ["| kind of prompt | " + " | ".join(shapes) + " |", "| --- |" + " --- |" * len(shapes)]
    for name in dict.fromkeys(row["set"] for row in rows):
        found = {row["shape"]: row for row in rows if row["set"] == name}
        kinds = list(next(iter(found.values()))["accept_length_by_kind"])
        cells = {
            kind: {shape: f"{row['accept_length_by_kind'][kind]:.2f}" for shape, row in found.items()}
            for kind in (kinds if len(kinds) > 1 else ())
        }
        cells[f"**{name}**"] = {
            shape: f"{row['accept_length']:.2f} ({row['accept_length_without_loops']:.2f})" for shape, row in found.items()
        }
        lines += ["| " + " | ".join([kind, *(values.get(shape, "-") for shape in shapes)]) + " |" for kind, values in cells.items()]
    where = "; ".join(dict.fromkeys(f"{row['machine']}, {row['dtype']}, commit {row['commit']}" for row in rows))
    how = f"Greedy answers of at most {rows[0]['new_tokens']} tokens; in brackets without answers that end in a loop."
    return "\n".join([*lines, "", f"{how} {unseen_kinds(run)}", f"Measured on: {where}.", ""])


def page() -> str:
    """docs/train.md with the table of the installed head."""
    before, _, rest = DOCS.read_text(encoding="utf-8").partition(BEGIN)
    rows, run = (json.loads((EMBEDDED_DRAFT / name).read_text(encoding="utf-8")) for name in ("evaluation.json", "run.json"))
    return before + BEGIN + acceptance(rows, run) + END + rest.partition(END)[2]


def install(results: Path) -> None:
    """Replace the embedded model's head; refuse a folder that is incomplete or too large."""
    missing = [name for name in FILES if not (results / name).is_file()]
    if missing:
        raise SystemExit(f"{results} lacks {', '.join(missing)}. Run all phases of train_eagle.py first.")
    size = sum((results / name).stat().st_size for name in FILES)
    if size > MAX_BYTES:
        raise SystemExit(f"{results} has {size:,} bytes; the limit is {MAX_BYTES:,}.")
    for name in FILES:
        shutil.copyfile(results / name, EMBEDDED_DRAFT / name)
        (EMBEDDED_DRAFT / name).chmod(0o644)


def main(argv: list[str] | None = None) -> None:
    """Run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="?", help="folder of the head")
    parser.add_argument("--check", action="store_true", help="change nothing")
    args = parser.parse_args(argv)
    if args.results is not None and args.check:
        raise SystemExit("--check takes no folder")
    if args.results is not None:
        install(args.results)
    if args.check and page() != DOCS.read_text(encoding="utf-8"):
        raise SystemExit(f"{DOCS.name} is out of date. Run python scripts/install_head.py.")
    if not args.check:
        DOCS.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
