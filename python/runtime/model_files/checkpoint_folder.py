"""Checks of a Hugging Face style checkpoint folder before it is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from runtime.errors import ConfigError
from runtime.model_files.safetensors_header import is_whole_safetensors


class SourceFlags(NamedTuple):
    """The flags that name a model, for errors about it."""

    path: str = "--model-path"
    load_format: str = "--load-format"


def check_config(folder: Path) -> dict[str, object]:
    """Return config.json of a model folder.

    Raises:
        ConfigError: it is missing or malformed.
    """
    return _read_object(folder / "config.json", f"{folder} is not a model folder: it lacks a config.json")


def check_shards(folder: Path, flags: SourceFlags) -> None:
    """Refuse a folder whose weights are missing, incomplete, or in a format that can run code.

    Raises:
        ConfigError: what is wrong, and what to do.
    """
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        shards = _read_object(index, "").get("weight_map")
        if not isinstance(shards, dict) or not shards:
            raise ConfigError(f"{index} names no shards; download it again")
        files = [folder / str(name) for name in sorted(set(shards.values()))]
    else:
        files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise _no_weights(folder, flags)
    for file in files:
        if not is_whole_safetensors(file):
            raise ConfigError(f"{file} is {'truncated or damaged' if file.exists() else 'missing'}; download it again")


def _no_weights(folder: Path, flags: SourceFlags) -> ConfigError:
    pickles = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
    if pickles:
        return ConfigError(
            f"{folder} holds weights only as pickles ({pickles[0]}), which can run code; convert them to safetensors, "
            "for example with transformers' save_pretrained, or use a revision that has them"
        )
    ggufs = sorted(path.name for path in folder.glob("*.gguf"))
    if ggufs:
        return ConfigError(f"{folder} holds GGUF files and no safetensors; give one as {flags.path}, for example {folder / ggufs[0]}")
    return ConfigError(f"{folder} holds no .safetensors file; download the weights, or use {flags.load_format} dummy for random ones")


def _read_object(path: Path, missing: str) -> dict[str, object]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(missing or f"{path} is missing") from error
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid JSON: {str(error)[:120]}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} is not a JSON object")
    return content
