"""Tensors of layers whose projections are quantised: their names, and the two ways in which files store those of experts."""

from __future__ import annotations

import re

import torch

PROJECTION = re.compile(r"(proj|proj_with_mqa|in_proj_\w+|\.w[123])\.weight$")
EXPERTS = re.compile(r"(experts\.)(gate_up|down)_proj$")
"""Tensors [E, rows, columns] of all experts of a layer."""


def one_by_one(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors, with those of all experts of a layer as tools that quantise write them."""
    out = {name: tensor for name, tensor in tensors.items() if not EXPERTS.search(name)}
    for name in tensors.keys() - out.keys():
        prefix, parts = name.rpartition(".")[0], ("gate", "up") if "gate_up" in name else ("down",)
        for expert, matrix in enumerate(tensors[name]):
            for part, rows in zip(parts, matrix.chunk(len(parts)), strict=True):
                out[f"{prefix}.{expert}.{part}_proj.weight"] = rows.clone()
    return out


def fused(name: str, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """The tensor `name` of all experts, of `one_by_one`."""
    prefix, parts = name.rpartition(".")[0], ("gate", "up") if "gate_up" in name else ("down",)
    count = sum(other.startswith(prefix + ".") and other.endswith(f"{parts[0]}_proj.weight") for other in tensors)
    return torch.stack([torch.cat([tensors[f"{prefix}.{e}.{part}_proj.weight"] for part in parts]) for e in range(count)])
