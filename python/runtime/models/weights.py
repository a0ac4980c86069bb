"""Which tensor of a checkpoint goes where in a model's fused parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch

from runtime.errors import ConfigError
from runtime.layers.linear import Int8Linear, Linear

SHOWN = 8
"""Names that an error lists before it says how many more there are."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where one checkpoint tensor goes: the shape it must have, and what stores it."""

    shape: tuple[int, ...]
    put: Callable[[torch.Tensor], object]


class WeightTable:
    """Allocates a model's parameters and remembers under which checkpoint names they are filled."""

    def __init__(self, dtype: torch.dtype, device: torch.device, linear: type[Linear]) -> None:
        self._dtype = dtype
        self._device = device
        self._linear = linear
        self._places: dict[str, Place] = {}
        self._tensors: list[torch.Tensor] = []

    def expected(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor wanted."""
        return {name: place.shape for name, place in self._places.items()}

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """A parameter filled by one tensor of the checkpoint."""
        target = torch.empty(shape, dtype=self._dtype, device=self._device)
        self._tensors.append(target)
        self._places[name] = Place(shape, target.copy_)
        return target

    def linear(self, parts: Mapping[str, int], in_features: int, bias: bool) -> Linear:
        """A linear layer made of several of the checkpoint's, one after another.

        Args:
            parts: name without `.weight` or `.bias`, and rows, of each part.
            in_features: columns of all of them.
            bias: whether they have biases.
        """
        layer = self._linear.empty(sum(parts.values()), in_features, bias, self._dtype, self._device)
        start = 0
        for name, rows in parts.items():
            self._places[name + ".weight"] = Place((rows, in_features), _putter(layer, start))
            if layer.bias is not None:
                self._places[name + ".bias"] = Place((rows,), layer.bias[start : start + rows].copy_)
            start += rows
        self._tensors += linear_tensors(layer)
        return layer

    def load(self, weights: Iterable[tuple[str, torch.Tensor]], skip: tuple[str, ...] = ()) -> None:
        """Fill every parameter.

        Args:
            weights: (name, tensor) in any order.
            skip: endings of names that may come and are not wanted.

        Raises:
            ConfigError: tensors are missing, unexpected or of another shape.
        """
        missing, unexpected = set(self._places), []
        for name, tensor in weights:
            place = self._places.get(name)
            if place is None:
                if not name.endswith(skip):
                    unexpected.append(name)
                continue
            if tuple(tensor.shape) != place.shape:
                raise ConfigError(f"tensor {name} has shape {list(tensor.shape)}; config.json asks for {list(place.shape)}")
            place.put(tensor)
            missing.discard(name)
        problems = [f"{what} {_listed(names)}" for what, names in (("lacks", missing), ("has unexpected", unexpected)) if names]
        if problems:
            raise ConfigError(f"the checkpoint does not fit its config.json: it {' and '.join(problems)}")

    def num_bytes(self, *others: Linear) -> int:
        """Bytes of all parameters and of `others`, each storage once."""
        tensors = [*self._tensors, *(t for layer in others for t in linear_tensors(layer))]
        return sum({t.data_ptr(): t.nbytes for t in tensors}.values())


def linear_tensors(layer: Linear) -> list[torch.Tensor]:
    """The tensors that a linear layer holds."""
    scale = layer.scale if isinstance(layer, Int8Linear) else None
    return [t for t in (layer.weight, scale, layer.bias) if t is not None]


def _putter(layer: Linear, start: int) -> Callable[[torch.Tensor], None]:
    return lambda rows: layer.put(start, rows.to(layer.weight.device))


def _listed(names: Iterable[str]) -> str:
    ordered = sorted(names)
    more = f" and {len(ordered) - SHOWN} more" if len(ordered) > SHOWN else ""
    return ", ".join(ordered[:SHOWN]) + more
