"""Writes a checkpoint of random weights for a shape of `benchmark/configs`: python -m benchmark.random_checkpoint SHAPE FOLDER."""

from __future__ import annotations

import argparse
import functools
import json
import math
import random
import shutil
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmark.shapes import CONFIGS
from runtime.layers.torch_ops import TorchOps
from runtime.model_executor.weight_loader import DUMMY_STD, FP8_SCALES, INT4_CODES, INT4_SCALE, INT4_ZERO_POINTS, INT4_ZEROS
from runtime.model_files.checkpoint_folder import INDEX
from runtime.model_files.safetensors_writer import file_start
from runtime.model_files.synthetic_tokenizer import write_synthetic_tokenizer
from runtime.models.decoder import DecoderModel
from runtime.models.mtp import MtpDraft
from runtime.models.registry import build_model, load_hf_config

SHARD_BYTES = 2 << 30
POOL_BYTES = 16 << 20
"""Bytes of random numbers of each kind. A tensor is a piece of them from a random start, repeated if the tensor is longer."""
FP8_SPREAD = 64.0
"""Standard deviation of the stored e4m3 numbers; the largest e4m3 number is 448."""
MXFP4_SCALE = 120
"""Exponent of the MXFP4 blocks. Their 4-bit numbers have a root mean square of about 3, which gives 3 * 2 ** (120 - 127) = 0.023."""
WRITERS = 8


@dataclass(frozen=True, slots=True)
class Stored:
    """The stored form of a tensor: safetensors' name of its dtype, bytes per number, and the kind of random numbers."""

    dtype: str
    width: int
    kind: str


ONES = Stored("BF16", 2, "ones")
NORMAL = Stored("BF16", 2, "normal")
WIDE = Stored("F32", 4, "wide")
FP8 = Stored("F8_E4M3", 1, "fp8")
FP8_SCALE = Stored("F32", 4, "fp8_scale")
CODES = Stored("U8", 1, "codes")
CODE_SCALE = Stored("U8", 1, "code_scale")
INT4 = Stored("I32", 4, "codes")
ZERO_POINTS = Stored("I32", 4, "zero_points")
INT4_GROUP_SCALE = Stored("F16", 2, "int4_scale")


def stored_as(name: str, shape: tuple[int, ...], names: Iterable[str]) -> Stored:
    """The stored form of tensor `name`; `names` are all tensors of the checkpoint."""
    if name.endswith(INT4_CODES):
        return INT4
    if name.endswith(INT4_ZERO_POINTS):
        return ZERO_POINTS
    if any(name.rpartition(".")[0] + codes in names for codes in INT4_CODES):
        return INT4_GROUP_SCALE
    if name.endswith("_blocks"):
        return CODES
    if name.endswith("_scales"):
        return CODE_SCALE
    if name.endswith(FP8_SCALES):
        return FP8_SCALE
    if name.endswith("e_score_correction_bias"):
        return WIDE
    if any(name.removesuffix(".weight") + scale in names for scale in FP8_SCALES):
        return FP8
    return ONES if len(shape) == 1 and "norm" in name else NORMAL


@functools.cache
def pools() -> dict[str, memoryview]:
    """The random bytes of every kind."""
    generator = torch.Generator().manual_seed(1)
    normal = torch.empty(POOL_BYTES // 2).normal_(0.0, 1.0, generator=generator)
    codes = torch.empty(POOL_BYTES, dtype=torch.uint8).random_(generator=generator)
    filled = {
        "ones": torch.ones(POOL_BYTES // 2, dtype=torch.bfloat16),
        "normal": (normal * DUMMY_STD).to(torch.bfloat16),
        "wide": normal[: POOL_BYTES // 4] * DUMMY_STD,
        "fp8": (normal * FP8_SPREAD).clamp_(-448, 448).to(torch.float8_e4m3fn),
        "fp8_scale": torch.full((POOL_BYTES // 4,), DUMMY_STD / FP8_SPREAD),
        "codes": codes,
        "zero_points": torch.full((POOL_BYTES // 4,), INT4_ZEROS, dtype=torch.int32),
        "int4_scale": (INT4_SCALE * (2.0 * torch.randint(2, (POOL_BYTES // 2,), generator=generator) - 1.0)).to(torch.float16),
        "code_scale": torch.full((POOL_BYTES,), MXFP4_SCALE, dtype=torch.uint8),
    }
    return {kind: memoryview(tensor.view(torch.uint8).numpy().data).cast("B") for kind, tensor in filled.items()}


def target_of(folder: Path) -> DecoderModel:
    """The model of `folder`/config.json, without weights. Its context is short, because the rotary table is computed nevertheless."""
    config = replace(load_hf_config(folder), max_context_len=1)
    return build_model(config, TorchOps(), torch.bfloat16, torch.device("meta"))


def expected(folder: Path) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of the checkpoint: those of the model, and of its MTP layer if it has one."""
    model = target_of(folder)
    return model.expected_weights() | ({} if model.config.mtp is None else MtpDraft(model).expected_weights())


def stored_bytes(wanted: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """Bytes of every tensor in the file."""
    return {name: _bytes(shape, stored_as(name, shape, wanted.keys())) for name, shape in wanted.items()}


def read_config(shape: Path) -> dict[str, Any]:
    """The config.json of a shape."""
    return json.loads((shape / "config.json").read_text(encoding="utf-8"))


def write_config(shape: Path, folder: Path, changes: Mapping[str, Any]) -> Path:
    """Write the config.json and a tokenizer of a shape, with `changes` to its fields; returns `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    config = read_config(shape)
    text = config.get("text_config", config)
    text |= changes
    if text.get("layer_types"):
        text["layer_types"] = text["layer_types"][: text["num_hidden_layers"]]
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    write_synthetic_tokenizer(folder, text["vocab_size"])
    return folder


def write(shape: Path, folder: Path, changes: Mapping[str, Any] | None = None) -> Path:
    """Write config.json, tokenizer and weights of a shape; returns `folder`.

    Args:
        shape: a folder with its config.json.
        folder: where the checkpoint goes; created.
        changes: fields of config.json with other values.
    """
    started = time.perf_counter()
    write_config(shape, folder, changes or {})
    wanted = expected(folder)
    forms = {name: stored_as(name, size, wanted.keys()) for name, size in wanted.items()}
    shards = _shards(wanted, forms)
    random_bytes = pools()
    with ThreadPoolExecutor(WRITERS) as threads:
        files = [folder / f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
        written = [
            threads.submit(_write_shard, file, {name: wanted[name] for name in names}, forms, random_bytes)
            for file, names in zip(files, shards, strict=True)
        ]
        total = sum(job.result() for job in written)
    where = {name: file.name for file, names in zip(files, shards, strict=True) for name in names}
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": where}), encoding="utf-8")
    print(f"{shape.name}: {len(wanted)} tensors, {total / 1e9:.1f} GB in {time.perf_counter() - started:.1f} s", flush=True)
    return folder


def _bytes(shape: tuple[int, ...], form: Stored) -> int:
    return math.prod(shape) * form.width


def _shards(wanted: Mapping[str, tuple[int, ...]], forms: Mapping[str, Stored]) -> list[list[str]]:
    """The names by file, in order; each file has about `SHARD_BYTES`."""
    shards, size = [list[str]()], 0
    for name, shape in wanted.items():
        if size > SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += _bytes(shape, forms[name])
    return shards


def _write_shard(
    file: Path, tensors: Mapping[str, tuple[int, ...]], forms: Mapping[str, Stored], random_bytes: Mapping[str, memoryview]
) -> int:
    """Write one file; returns the bytes of its tensors."""
    with file.open("wb") as out:
        out.write(file_start((name, forms[name].dtype, shape, forms[name].width) for name, shape in tensors.items()))
        for name, shape in tensors.items():
            pool, left = random_bytes[forms[name].kind], _bytes(shape, forms[name])
            start = random.Random(name).randrange(len(pool) // 8) * 4  # aligned to every number width
            while left:
                piece = pool[start : start + min(left, len(pool) - start)]
                out.write(piece)
                left, start = left - len(piece), 0
    return sum(_bytes(shape, forms[name]) for name, shape in tensors.items())


def main() -> None:
    """Write the checkpoint selected on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", choices=sorted(path.parent.name for path in CONFIGS.glob("*/config.json")))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, help="only the first so many layers")
    parser.add_argument("--replace", action="store_true", help="remove the folder first")
    args = parser.parse_args()
    if args.replace:
        shutil.rmtree(args.folder, ignore_errors=True)
    write(CONFIGS / args.shape, args.folder, {} if args.layers is None else {"num_hidden_layers": args.layers})


if __name__ == "__main__":
    main()
