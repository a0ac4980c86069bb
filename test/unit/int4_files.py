"""Writes int4 checkpoints as AutoAWQ, GPTQModel and llm-compressor do, and the float weights that they stand for."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from unit.expert_tensors import EXPERTS, PROJECTION, fused, one_by_one

Tensors = dict[str, torch.Tensor]
EXPERT = re.compile(r"experts\.(\d+)\.")


@dataclass(frozen=True)
class Form:
    """A format of int4 checkpoints.

    Attributes:
        method: `quant_method` of the layout.
        symmetric: whether all zero points are 8.
        fields: other fields of `quantization_config`.
        order: whether GPTQ files have `g_idx`.
        shuffled: whether the columns of a group are not neighbours; the same for all layers of one width.
    """

    method: str
    group: int = 32
    symmetric: bool = False
    order: bool = True
    shuffled: bool = False
    fields: tuple[tuple[str, Any], ...] = ()

    @property
    def config(self) -> dict[str, Any]:
        """`quantization_config`."""
        base: dict[str, Any] = {"quant_method": self.method}
        if self.method == "awq":
            base |= {"bits": 4, "group_size": self.group, "zero_point": not self.symmetric, "version": "gemm"}
        elif self.method == "gptq":
            base |= {"bits": 4, "group_size": self.group, "sym": self.symmetric, "desc_act": False, "checkpoint_format": "gptq"}
        else:
            weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": self.group, "symmetric": self.symmetric}
            group = {
                "targets": ["Linear"],
                "weights": {**weights, "actorder": "group" if self.shuffled else None},
                "input_activations": None,
            }
            base |= {"format": "pack-quantized", "config_groups": {"group_0": group}, "ignore": ["lm_head", "re:.*gate$"]}
        return base | dict(self.fields)


FORMS = {
    "awq": Form("awq"),
    "awq-128": Form("awq", 128),
    "awq-symmetric": Form("awq", 64, symmetric=True),
    "gptq": Form("gptq", symmetric=True),
    "gptq-128": Form("gptq", 128, order=False),
    "gptq-v2": Form("gptq", 64, fields=(("checkpoint_format", "gptq_v2"),)),
    "gptq-ordered": Form("gptq", fields=(("desc_act", True),)),
    "auto-round-awq": Form("awq", fields=(("quant_method", "auto-round"), ("packing_format", "auto_round:auto_awq"))),
    "auto-round-gptq": Form(
        "gptq", 128, fields=(("quant_method", "auto-round"), ("packing_format", "auto_round:auto_gptq"), ("data_type", "int"))
    ),
    "auto-round-gptqmodel": Form("gptq", 64, fields=(("quant_method", "auto-round"), ("packing_format", "auto_round:gptqmodel"))),
    "compressed": Form("compressed-tensors", symmetric=True),
    "compressed-128": Form("compressed-tensors", 128),
}

SHUFFLED_FORMS = {
    "gptq-activation-order": Form("gptq", shuffled=True, fields=(("desc_act", True),)),
    "gptq-activation-order-128": Form("gptq", 128, symmetric=True, shuffled=True, fields=(("desc_act", True),)),
    "compressed-activation-order": Form("compressed-tensors", 64, shuffled=True),
}


def words(codes: np.ndarray, axis: int, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """Pack codes 0 to 15 along an axis, eight in a word: bits 4 * i to 4 * i + 3 hold the code at place `order[i]` of the eight."""
    lines = np.moveaxis(codes.astype(np.uint32), axis, -1)
    packed = np.zeros((*lines.shape[:-1], lines.shape[-1] // 8), np.uint32)
    for i, place in enumerate(order):
        packed |= lines[..., place::8] << np.uint32(4 * i)
    return torch.from_numpy(np.ascontiguousarray(np.moveaxis(packed, -1, axis)).view(np.int32))


def packed(weight: torch.Tensor, form: Form, zero_points: bool = False, seed: int = 0) -> tuple[Tensors, torch.Tensor]:
    """The tensors of a weight [out, in], by the suffix of their names, and the float32 weight that they stand for.

    `zero_points`: they are kept, as on a GPU. On a CPU a minimum, the negative zero point times the scale, is stored in float16 instead.
    `seed`: of the order of shuffled columns.
    """
    out, columns = weight.shape
    order = torch.randperm(columns, generator=torch.Generator().manual_seed(columns + seed)) if form.shuffled else torch.arange(columns)
    places = order.argsort()

    def moved(wide: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        return wide[:, columns] if form.shuffled else wide  # without a copy, because tests pack thousands of weights

    groups = moved(weight.float(), order).unflatten(1, (-1, form.group))
    group_of = (places // form.group).int()
    dtype = torch.bfloat16 if form.method == "compressed-tensors" else torch.float16
    if form.symmetric:
        scale = (groups.abs().amax(2) / 7.5).to(dtype)
        zero = torch.full_like(scale, 8, dtype=torch.float32)
    else:
        least = groups.amin(2).clamp(max=0)
        scale = ((groups.amax(2).clamp(min=0) - least) / 15).to(dtype)
        zero = (-least / scale.float()).round().clamp(0, 15)
    codes = (groups / scale.float()[..., None] + zero[..., None]).round().clamp(0, 15)
    wide = scale.float()[..., None]
    minimum = (-zero * scale.float()).half().float()
    value = moved(((codes - zero[..., None]) * wide if zero_points else codes * wide + minimum[..., None]).flatten(1), places)
    numbers, zeros = moved(codes.flatten(1), places).numpy(), zero.numpy()
    if form.method == "awq":
        order = (0, 2, 4, 6, 1, 3, 5, 7)
        return {"qweight": words(numbers.T, 1, order), "qzeros": words(zeros.T, 1, order), "scales": scale.T.contiguous()}, value
    if form.method == "gptq":
        fields = dict(form.fields)
        offset = 0 if "gptq_v2" in fields.values() or "auto_round:gptqmodel" in fields.values() else 1
        stored = words(zeros.T, 1) - offset * 0x11111111  # whole words, as GPTQModel does: a code of 0 borrows from the next one
        tensors = {"qweight": words(numbers.T, 0), "qzeros": stored, "scales": scale.T.contiguous()}
        return tensors | ({"g_idx": group_of} if form.order else {}), value
    tensors = {"weight_packed": words(numbers, 1), "weight_scale": scale, "weight_shape": torch.tensor([out, columns])}
    tensors |= {"weight_g_idx": group_of} if form.shuffled else {}
    return tensors | ({} if form.symmetric else {"weight_zero_point": words(zeros, 0)}), value


def write_int4(folder: Path, model: PreTrainedModel, form: Form, layers: re.Pattern[str] = PROJECTION) -> PreTrainedModel:
    """Save `model` with these projections of its layers in int4. Returns the model that they stand for."""
    model.save_pretrained(folder / "exact")
    for file in (folder / "exact").glob("*.json"):
        shutil.copy(file, folder)
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"quantization_config": form.config}))
    saved = load_file(folder / "exact" / "model.safetensors")
    tensors = one_by_one(saved)
    wide = dict(tensors)
    for name in [name for name in tensors if layers.search(name)]:
        expert = EXPERT.search(name)  # its columns may have an order of their own
        parts, wide[name] = packed(tensors.pop(name), form, seed=int(expert[1]) if expert else 0)
        tensors |= {name.removesuffix("weight") + suffix: part.contiguous() for suffix, part in parts.items()}
    save_file(tensors, folder / "model.safetensors")
    exact = {name: fused(name, wide) if EXPERTS.search(name) else wide[name] for name in saved}
    save_file(exact, folder / "exact" / "model.safetensors", metadata={"format": "pt"})
    return type(model).from_pretrained(folder / "exact", dtype=torch.float32)
