"""Finds and checks the files of a Hugging Face style checkpoint folder before they are loaded."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from runtime.errors import ConfigError
from runtime.json_file import check_pointer, read_object
from runtime.model_files.safetensors_header import Entry, is_whole_safetensors, read_header

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
"""The weights file of a checkpoint that is not sharded."""


NUMBERED = re.compile(r"(.*-)(\d{5})-of-(\d{5})\.safetensors")
"""Names of the files of a sharded checkpoint: before the number, the number, and how many there are."""


class SourceFlags(NamedTuple):
    """The names of the flags that select a model, for errors about it."""

    path: str = "--model-path"
    load_format: str = "--load-format"


TARGET_FLAGS = SourceFlags()


def check_config(folder: Path) -> dict[str, object]:
    """Return config.json of a model folder.

    Raises:
        ConfigError: it is missing or malformed.
    """
    return read_object(folder / "config.json", f"{folder} is not a model folder: it lacks a config.json")


def check_shards(folder: Path, flags: SourceFlags) -> None:
    """Refuse a folder whose weights are missing, incomplete, or in a format that can run code.

    Raises:
        ConfigError: states what is wrong and what to do.
    """
    for file in safetensors_files(folder, flags):
        check_pointer(file)
        if not is_whole_safetensors(file):
            raise ConfigError(f"{file} is truncated or damaged; download it again")


def safetensors_files(folder: Path, flags: SourceFlags = TARGET_FLAGS) -> list[Path]:
    """The weights files of a checkpoint, chosen as in transformers.

    `model.safetensors` alone if it exists: other files may be adapters, copies in another layout, or earlier shards. Otherwise the files in
    the index, or all safetensors files if there is no index.

    Raises:
        ConfigError: there are none, or one is missing.
    """
    index, single = folder / INDEX, folder / SINGLE
    names = _indexed_names(index) if index.is_file() else _numbered_names(file.name for file in sorted(folder.glob("*.safetensors")))
    if single.is_file() and not (index.is_file() and SINGLE in names):
        return [single]
    if not names:
        raise _no_weights(folder, flags)
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise ConfigError(f"{folder} lacks {len(missing)} of {len(names)} weight files, the first is {missing[0]}; download it again")
    return [folder / name for name in names]


def tensor_places(folder: Path) -> dict[str, tuple[Path, Entry]]:
    """The file and the place of each tensor, by name. Empty if weights are missing or damaged, for example with dummy weights; an error is
    then reported when they are loaded.
    """
    try:
        return {entry.name: (file, entry) for file in safetensors_files(folder) for entry in read_header(file)}
    except (ConfigError, OSError, ValueError):
        return {}


def _indexed_names(index: Path) -> list[str]:
    """The names of the files in which an index places tensors."""
    shards = read_object(index).get("weight_map")
    if not isinstance(shards, dict) or not shards:
        raise ConfigError(f"{index} is not an index of safetensors files; download it again")
    # The index is untrusted: it may name only files in its own folder.
    outside = [name for name in shards.values() if not isinstance(name, str) or Path(name).name != name]
    if outside:
        raise ConfigError(f"{index} names a file outside its folder: {outside[0]!r}")
    return sorted(set(shards.values()))


def _numbered_names(names: Iterable[str]) -> list[str]:
    """Names of files, with those that their numbers, such as in model-00001-of-00002.safetensors, tell to be missing."""
    found = dict.fromkeys(names)
    for name in list(found):
        if parts := NUMBERED.fullmatch(name):
            start, number, count = parts.groups()
            found |= dict.fromkeys(f"{start}{i:0{len(number)}}-of-{count}.safetensors" for i in range(1, int(count) + 1))
    return sorted(found)


def _no_weights(folder: Path, flags: SourceFlags) -> ConfigError:
    pickles = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
    if pickles:
        return ConfigError(
            f"{folder} holds weights only as pickles ({pickles[0]}), which can run code; use a revision with safetensors, or convert them: "
            "a model with transformers' save_pretrained, a draft head as docs/speculation.md shows"
        )
    ggufs = sorted(path.name for path in folder.glob("*.gguf"))
    if ggufs:
        return ConfigError(f"{folder} holds GGUF files and no safetensors; give one as {flags.path}, for example {folder / ggufs[0]}")
    return ConfigError(
        f"{folder} holds no .safetensors file; download the weights, or use {flags.load_format} dummy for random ones. "
        "Weights published as pickles (.bin) are not read."
    )
