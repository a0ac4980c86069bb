"""The draft in the target's own checkpoint: one layer trained for multi-token prediction, which reads the token's embedding and
the target's hidden state.

Source: DeepSeek-V3, arXiv:2412.19437, section 2.2; MiMo, arXiv:2505.07608. The layer runs once per draft token, like an EAGLE
head.
"""

from __future__ import annotations

import dataclasses

import torch

from runtime.distributed.parallel_group import ParallelGroup
from runtime.errors import ConfigError
from runtime.layers.draft_input import DraftInput
from runtime.layers.forward_batch import ForwardBatch
from runtime.layers.ops import Stream
from runtime.models.block import Block, attention_specs
from runtime.models.config import ModelConfig
from runtime.models.decoder import DecoderModel
from runtime.models.draft_head import DraftHead, DraftModel
from runtime.models.registry import FAMILIES
from runtime.models.weights import NamedTensors

SHARED = (
    "embed_tokens.weight", "shared_head.head.weight", "shared_head.head.weight_scale", "shared_head.head.weight_scale_inv",
    "rotary_emb.inv_freq",
)  # fmt: skip
"""Suffixes of tensors that a checkpoint repeats for the layer; the target's are used instead."""


class MtpDraft(DraftHead, DraftModel):
    """The MTP layer of the target's own checkpoint as a `DraftModel`; embedding and LM head are the target's.

    Attributes:
        proj: normed embedding and hidden state, in the family's order [2 * hidden] -> hidden.
        layer: the block.
        lm_head: the target's, or only its rows in the token map.
    """

    def __init__(self, target: DecoderModel, token_map: torch.Tensor | None = None, group: ParallelGroup | None = None) -> None:
        """Allocate the layer.

        Args:
            token_map: int64 [Vd], the target ids that the draft may propose, or None for all.
            group: the ranks that share the layer; by default those that share the target's.

        Raises:
            ConfigError: the target's checkpoint holds no such layer.
        """
        super().__init__(mtp_config(target.config), target, target.context, group)
        assert self.config.mtp is not None, "checked by mtp_config"
        self._names = names = self.config.mtp
        self.feature_width = self.hidden_width = hidden = self.config.hidden_size
        self.hidden_dtype = target.dtype if names.feeds_normed else torch.float32
        parts, prefix = self.parts, names.prefix
        token_norm, hidden_norm, self._final_norm = (
            parts.norm(f"{prefix}{name}.weight") for name in (names.token_norm, names.hidden_norm, names.final_norm)
        )
        self._input = DraftInput((token_norm, hidden_norm), names.hidden_first, names.blank_start)
        self.proj = parts.weights.linear({prefix + names.proj: hidden}, 2 * hidden)
        layer = FAMILIES[self.config.architecture].block(parts, prefix + names.block, 0)
        assert isinstance(layer, Block), "no family with such a layer norms the outputs of attention and MLP"
        self.layer, self.layers = layer, [layer]
        self.head_norm = None if names.feeds_normed else self._final_norm
        self.attention_specs = attention_specs(self.layers)
        self.keep_tokens(token_map)
        self.lm_head = self.kept_rows(target.lm_head)

    def load(self, weights: NamedTensors) -> None:
        """Fill the weights; load the target first.

        Args:
            weights: the target's whole checkpoint; tensors of other layers are not read.

        Raises:
            ConfigError: tensors are missing, unexpected or have the wrong shape; the message names them.
        """
        own = ((name, tensor) for name, tensor in weights if name.startswith(self._names.prefix))
        self.parts.weights.load(own, SHARED)
        self.layer.attention.weights_filled()
        self.lm_head = self.kept_rows(self._target.lm_head)

    def forward(self, batch: ForwardBatch, wanted: torch.Tensor | None = None) -> torch.Tensor:
        """Run the layer: [T, hidden], or [N, hidden] with `wanted`, in `hidden_dtype`. See `DraftModel.forward`."""
        assert batch.hidden_states is not None, "a draft layer needs hidden states"
        rows, _ = self.ops.join(batch.input_ids, self.embed, batch.hidden_states, batch.positions, self._input)
        x = self.ops.linear(rows, self.proj)
        h = self.layer.forward(Stream(x.to(torch.float32, copy=True)), self.context(batch), wanted=wanted).h
        return self.ops.norm(h, self._final_norm, self.dtype) if self._names.feeds_normed else h


def mtp_config(target: ModelConfig) -> ModelConfig:
    """The architecture of the MTP layer, which is like the target's last layer with keys and values.

    Raises:
        ConfigError: the target's checkpoint has no such layer.
    """
    if target.mtp is None:
        raise ConfigError(
            f"{target.architecture} has no layer for multi-token prediction in this checkpoint. Use "
            "--speculative-algorithm NGRAM, or EAGLE with a draft model."
        )
    moe = None if target.moe is None else dataclasses.replace(target.moe, layers=(True,))
    return dataclasses.replace(target, num_layers=1, window=target.window[-1:], moe=moe, delta=None)
