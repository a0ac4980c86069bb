"""A model family for a test: Llama whose odd layers have no MLP."""

from __future__ import annotations

from collections.abc import Iterator

from runtime.layers.gemm.gemm import Gemm
from runtime.layers.norm import RMSNorm
from runtime.layers.ops import Stream
from runtime.models.block import Block
from runtime.models.config import ModelConfig
from runtime.models.config_fields import ConfigFields
from runtime.models.hf_config import decoder_config
from runtime.models.parts import ModelParts


class NoMlp:
    kernel_launches = 0
    active_parameters = 0

    def gemms(self, norm: RMSNorm, next_norm: RMSNorm) -> Iterator[Gemm]:
        return iter(())

    def forward(self, stream: Stream, norm: RMSNorm, next_norm: RMSNorm | None) -> Stream:
        return Stream(stream.h, in_prompt=stream.in_prompt)


DEFAULTS: dict[str, object] = {}


def parse(fields: ConfigFields) -> ModelConfig:
    return decoder_config(fields)


def block(parts: ModelParts, prefix: str, layer: int) -> Block:
    if layer % 2 == 0:
        return parts.usual_block(prefix, layer)
    attn_norm, mlp_norm = (parts.norm(f"{prefix}{name}_layernorm.weight") for name in ("input", "post_attention"))
    return Block(parts.attention(prefix + "self_attn.", layer), NoMlp(), attn_norm, mlp_norm)
