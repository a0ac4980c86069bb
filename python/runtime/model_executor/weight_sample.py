"""A hash by which nodes notice that they have different weights."""

from __future__ import annotations

import hashlib

from runtime.model_executor.weight_loader import safetensors_weights
from runtime.models.file_tensor import FileTensor

SAMPLED = 64
"""Tensors of which bytes are read: the weights of two models of one shape differ almost everywhere."""
SAMPLE_BYTES = 256


def weight_sample(folder: str) -> str:
    """A hash of the names and shapes of all tensors in `folder`, however they are split into files, and of some bytes of a few of them.

    Raises:
        ConfigError: the files are missing or damaged.
    """
    tensors = sorted(safetensors_weights(folder, progress=False), key=lambda pair: pair[0])
    found = hashlib.sha256(repr([(name, tensor.shape, str(tensor.dtype)) for name, tensor in tensors]).encode())
    readable = [tensor for _, tensor in tensors if isinstance(tensor, FileTensor) and tensor.nbytes]
    for tensor in readable[:: -(-len(readable) // SAMPLED) or 1]:
        middle = tensor.nbytes // 2
        data = bytearray(min(SAMPLE_BYTES, tensor.nbytes - middle))
        tensor.file.read(tensor.offset + middle, [memoryview(data)])
        found.update(data)
    return found.hexdigest()
