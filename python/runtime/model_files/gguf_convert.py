"""Converts a GGUF file to a Hugging Face style folder in the cache."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from runtime.model_files.cache_folder import build_once
from runtime.model_files.gguf_config import TensorPlan, eos_ids, hf_config, plan_tensors, unpermute
from runtime.model_files.gguf_file import GGUFFile
from runtime.model_files.gguf_tokenizer import write_tokenizer
from runtime.model_files.safetensors_header import is_whole_safetensors
from runtime.model_files.safetensors_writer import Dtype, write_safetensors
from runtime.progress_bar import progress_bar

logger = logging.getLogger(__name__)

VERSION = 2  # version of the output; increment it when the output changes, so that older folders are not used
FLOAT32_UP_TO = 1_500_000_000  # number of parameters; larger models are converted to bfloat16, to halve disk and memory
WEIGHTS = "model.safetensors"


def converted_folder(path: Path, cache_dir: Path) -> Path:
    """Return the converted form of the GGUF file `path`; convert it if it is not in the cache yet.

    The cache identifies a file by path, size and modification time, because hashing gigabytes at each start would take longer than loading.

    Raises:
        ConfigError: the file is missing, damaged, or of an unsupported architecture.
    """
    file_stat = path.stat() if os.path.isfile(path) else None
    identity = f"{path.resolve()}|{file_stat and file_stat.st_size}|{file_stat and file_stat.st_mtime_ns}"
    return convert_as(f"{path.stem[:60]}-{hashlib.sha256(identity.encode()).hexdigest()[:12]}", path, cache_dir)


def convert_as(name: str, path: Path, cache_dir: Path) -> Path:
    """Return the folder `name` of the cache, converted from the GGUF file `path` if it is missing."""
    return build_once(cache_dir, folder_name(name), lambda folder: convert(path, folder), is_converted)


def folder_name(name: str) -> str:
    """The cache folder of the conversion `name`."""
    return f"{name}-v{VERSION}"


def is_converted(folder: Path) -> bool:
    """Whether `folder` is a complete conversion."""
    return all((folder / name).is_file() for name in ("config.json", "generation_config.json")) and is_whole_safetensors(folder / WEIGHTS)


def convert(path: Path, folder: Path) -> None:
    """Write the config, the weights and, if there is one, the tokenizer of the GGUF file `path` into the empty `folder`."""
    file = GGUFFile(path)
    config = hf_config(file)
    plans = plan_tensors(file, config)
    shapes = {plan.target: file.shape(plan.source) for plan in plans}
    params = sum(math.prod(shape) for shape in shapes.values())
    dtype: Dtype = "F32" if params <= FLOAT32_UP_TO else "BF16"
    config["torch_dtype"] = "float32" if dtype == "F32" else "bfloat16"
    logger.info("converting %s (%.0f M parameters, %s) into the cache; this happens once", path.name, params / 1e6, config["torch_dtype"])
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", {"eos_token_id": eos_ids(file)})
    write_tokenizer(file, folder)
    write_safetensors(folder / WEIGHTS, shapes, dtype, _weights(file, plans))


def _weights(file: GGUFFile, plans: list[TensorPlan]) -> Iterator[np.ndarray]:
    for plan in progress_bar(plans, shown=True, desc="Converting weights", unit="tensor", mininterval=0.5):
        values = file.tensor(plan.source)
        yield unpermute(values, plan.heads) if plan.heads else values


def _write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
