"""Prints a software bill of materials, in CycloneDX's JSON form, of the packages that serve.sh installs on a CPU.

python scripts/sbom.py > sbom.json
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[1] / "requirements"
LOCKS = ("torch-cpu.lock", "serve.lock")
_PIN = re.compile(r"(?P<name>[A-Za-z0-9._-]+)==(?P<version>[A-Za-z0-9.+!]+)")
_HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})")


def components(lock: str) -> list[dict[str, Any]]:
    """Name, version, package URL and hashes of each pinned package."""
    found: list[dict[str, Any]] = []
    for line in lock.splitlines():
        if pin := _PIN.match(line):
            name, version = pin["name"].lower(), pin["version"]
            purl = f"pkg:pypi/{name}@{version}"
            found.append({"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl, "hashes": []})
        elif digest := _HASH.search(line):
            found[-1]["hashes"].append({"alg": "SHA-256", "content": digest[1]})
    return found


def main() -> int:
    """Print the document."""
    lock = "".join((FOLDER / name).read_text(encoding="utf-8") for name in LOCKS)
    document = {"bomFormat": "CycloneDX", "specVersion": "1.6", "version": 1, "components": components(lock)}
    json.dump(document, sys.stdout, indent=1)
    print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
