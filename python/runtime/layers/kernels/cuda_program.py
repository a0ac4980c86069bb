"""Assembles CUDA C++ programs: `primitives.cu`, the constants of a kernel, then its files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

PRIMITIVES = Path(__file__).with_name("primitives.cu")


def program(constants: Mapping[str, int | str], *parts: Path | str) -> str:
    """The text of a program. `constants`: true and false become 1 and 0. `parts`: files, or generated text."""
    texts = (part if isinstance(part, str) else part.read_text(encoding="utf-8") for part in parts)
    defines = (f"#define {name} {int(value) if isinstance(value, bool) else value}" for name, value in constants.items())
    return "\n".join([PRIMITIVES.read_text(encoding="utf-8"), *defines, *texts])
