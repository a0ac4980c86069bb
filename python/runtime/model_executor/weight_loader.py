"""Where a model's tensors come from: safetensors files or random numbers, as (name, tensor) pairs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from tqdm import tqdm

from runtime.errors import ConfigError

NamedTensors = Iterator[tuple[str, torch.Tensor]]
INDEX = "model.safetensors.index.json"
DUMMY_STD = 0.02
PICKLES = ("*.bin", "*.pt", "*.pth")


def safetensors_weights(folder: str | Path, device: torch.device, progress: bool = True) -> NamedTensors:
    """Every tensor of a checkpoint folder, read straight onto `device`, with a progress bar in bytes.

    Raises:
        ConfigError: there are no safetensors files, one that the index names is missing, or one is damaged.
    """
    files = safetensors_files(Path(folder))
    total = sum(f.stat().st_size for f in files)
    with tqdm(total=total, unit="B", unit_scale=True, desc="Loading weights", disable=not progress) as bar:
        for file in files:
            yield from _tensors_of(file, device, bar)


def dummy_weights(shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, device: torch.device, seed: int = 0) -> NamedTensors:
    """Random weights that depend on the seed and the order of `shapes` alone: norms are one, biases zero, the rest normal with std 0.02.

    The stream's variance then stays bounded, so activations are finite at any depth.
    """
    generator = torch.Generator(device).manual_seed(seed)
    for name, shape in shapes.items():
        if name.endswith(".bias"):
            yield name, torch.zeros(shape, dtype=dtype, device=device)
        elif len(shape) == 1:
            yield name, torch.ones(shape, dtype=dtype, device=device)
        else:
            yield name, torch.empty(shape, dtype=dtype, device=device).normal_(0.0, DUMMY_STD, generator=generator)


def safetensors_files(folder: Path) -> list[Path]:
    """The files of a checkpoint: those that its index names, or every safetensors file where there is no index.

    Raises:
        ConfigError: there are none, or one is missing.
    """
    index = folder / INDEX
    if index.is_file():
        return _indexed_files(index)
    files = sorted(folder.glob("*.safetensors"))
    if files:
        return files
    pickles = sorted(p.name for pattern in PICKLES for p in folder.glob(pattern))
    if pickles:
        raise ConfigError(
            f"{folder} holds its weights as pickle ({pickles[0]}), which can run code and is never loaded; "
            "convert it: load it with transformers where you trust it, then save_pretrained(folder, safe_serialization=True)"
        )
    raise ConfigError(f"{folder} holds no .safetensors file; download the weights, or use --load-format dummy for random ones")


def _indexed_files(index: Path) -> list[Path]:
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{index} is not an index of safetensors files: {error!r}") from error
    # An index is data from elsewhere: it may name files of its own folder only.
    outside = [n for n in names if not isinstance(n, str) or Path(n).name != n]
    if outside:
        raise ConfigError(f"{index} names a file outside its folder: {outside[0]!r}")
    missing = [n for n in names if not (index.parent / n).is_file()]
    if missing:
        raise ConfigError(f"{index.parent} lacks {len(missing)} of {len(names)} weight files, the first is {missing[0]}; download it again")
    return [index.parent / n for n in names]


def _tensors_of(file: Path, device: torch.device, bar: tqdm) -> NamedTensors:
    try:
        with safe_open(str(file), framework="pt", device=str(device)) as opened:
            for name in opened.keys():  # noqa: SIM118 (not a dict)
                tensor = opened.get_tensor(name)
                yield name, tensor
                bar.update(tensor.nbytes)
    except SafetensorError as error:
        raise ConfigError(f"{file} is damaged or cut short: {error}; download it again") from error
