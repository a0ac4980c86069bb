"""The EAGLE-3 draft head: usually one decoder layer, which reads the token's embedding and a projection of three of the target's
hidden states.

Source: EAGLE-3, Li et al. 2025, arXiv:2503.01840; tensor names follow the published checkpoints.
"""

from __future__ import annotations

import torch

from runtime.distributed.parallel_group import ParallelGroup
from runtime.errors import ConfigError
from runtime.layers.draft_input import DraftInput, StreamStart
from runtime.layers.forward_batch import ForwardBatch
from runtime.layers.linear import Linear
from runtime.layers.ops import Stream
from runtime.models.block import attention_specs
from runtime.models.decoder import DecoderModel
from runtime.models.draft_config import DraftConfig
from runtime.models.draft_head import DraftHead, DraftModel, OptionalTensors, shared_if_equal
from runtime.models.weights import NamedTensors

NUM_AUX = 3


class LlamaForCausalLMEagle3(DraftHead, DraftModel):
    """An EAGLE-3 head as a `DraftModel`, with its own norm and an LM head whose vocabulary is often a part of the target's.

    The first draft step reads the target's three states, projected by `fc`, or without `Eagle3Layout.use_aux_hidden_state` the
    target's last state; later steps read the head's own residual stream, before its norm or, with `norm_output`, after it. That
    stream is float32, like the target's.

    Attributes:
        fc: the target's three states -> hidden; None if the head reads the last one.
    """

    def __init__(self, config: DraftConfig, target: DecoderModel, group: ParallelGroup | None = None) -> None:
        """Allocate the head. `group`: the ranks that share its block; by default those that share the target's.

        Raises:
            ConfigError: three target states together are as wide as the head's own.
        """
        super().__init__(config.model, target, group=group)
        c, parts = config.model, self.parts
        self.aux_layers = config.aux_layers
        self.hidden_width = c.hidden_size
        projects = config.layout.use_aux_hidden_state
        self.feature_width = NUM_AUX * (c.target_hidden_size or c.hidden_size) if projects else c.hidden_size
        if projects and self.feature_width == self.hidden_width:
            raise ConfigError(f"the EAGLE-3 draft head is as wide as three of its target's hidden states, {self.feature_width}")
        self.hidden_dtype = torch.float32
        self._layout = config.layout
        self.fc = parts.weights.linear({"fc": c.hidden_size}, self.feature_width) if projects else None
        first = parts.usual_block("midlayer.", 0, in_features=2 * c.hidden_size, input_norm=False)
        self.layers = [first, *(parts.usual_block(f"layers.{i}.", i) for i in range(1, c.num_layers))]
        self.attention_specs = attention_specs(self.layers)
        norms = parts.norm("midlayer.input_layernorm.weight"), parts.norm("midlayer.hidden_norm.weight")
        stream = StreamStart.NORMED_STATE if config.layout.norm_before_residual else StreamStart.STATE
        self._input = DraftInput(norms, stream=stream)
        self._norm = parts.norm("norm.weight")
        self.head_norm = None if config.layout.norm_output else self._norm
        self._input_norm = parts.norm("input_norm.weight", self.feature_width) if config.layout.norm_before_fc else None
        state_width = self.feature_width // NUM_AUX
        self._state_norms = [parts.norm(f"fc_norm.{i}.weight", state_width) for i in range(NUM_AUX if config.layout.fc_norm else 0)]
        self._own_head = c.draft_vocab_size is not None and not c.tie_embeddings
        if self._own_head:
            self.lm_head = parts.weights.head("lm_head", self.vocab_size, c.hidden_size)

    def load(self, weights: NamedTensors) -> None:
        """Fill the weights; load the target first.

        Args:
            weights: (published name, tensor of any float dtype), in any order, each once; a leading `model.` is
                ignored, and `layers.0.` is `midlayer.`. `d2t` int64 [Vd] holds what is added to a draft id to get the
                target's; `t2d` is its inverse and is not read.

        Raises:
            ConfigError: tensors are missing, unexpected or have the wrong shape; the message names them.
        """
        own_head = set() if self._own_head else {"lm_head.weight"}
        optional = OptionalTensors(frozenset({"embed_tokens.weight", "fc.bias", "d2t", "t2d"} | own_head))
        self.parts.weights.load(_of_midlayer(optional.split(weights)), ("rotary_emb.inv_freq",))
        c, target = self.config, self._target
        own_embed = optional.take("embed_tokens.weight", (c.vocab_size, c.hidden_size))
        if own_embed is None and target.config.hidden_size != c.hidden_size:
            raise ConfigError("the draft checkpoint lacks embed_tokens.weight, and its target's embedding has another width")
        self.embed = shared_if_equal(own_embed, target.embed)
        bias = optional.take("fc.bias", (c.hidden_size,))
        if bias is not None and self.fc is not None:
            self.fc.bias = bias.to(self.embed.device, target.dtype)
        self.load_map(optional)
        self._load_head(optional)

    def _load_head(self, optional: OptionalTensors) -> None:
        if self._own_head:
            return
        c = self.config
        if c.tie_embeddings:
            self.lm_head = Linear.sharded(self.embed if self.to_target is None else self.embed[self.to_target], self.group)
            return
        own = optional.take("lm_head.weight", (c.vocab_size, c.hidden_size))
        if own is None and self._target.config.hidden_size != c.hidden_size:
            raise ConfigError("the draft checkpoint lacks lm_head.weight, and its target's head has another width")
        self.lm_head = self.own_head(own)

    def project(self, aux_hidden: torch.Tensor) -> torch.Tensor:
        """The target's three states, concatenated, or its last state [T, feature_width] -> the head's state [T, hidden]."""
        if self.fc is None:
            return aux_hidden
        ops, dtype = self.ops, self.dtype
        x = aux_hidden.to(dtype)
        if self._input_norm is not None:
            x = ops.norm(x.float(), self._input_norm, dtype)
        if self._state_norms:
            states = zip(x.float().chunk(NUM_AUX, dim=1), self._state_norms, strict=True)
            x = torch.cat([ops.norm(state.contiguous(), norm, dtype) for state, norm in states], dim=1)
        return ops.linear(x, self.fc)

    def forward(self, batch: ForwardBatch, wanted: torch.Tensor | None = None) -> torch.Tensor:
        """Run the head: the residual stream, float32 [T, hidden], or [N, hidden] with `wanted`; final-normed if the layout
        feeds it back so. Projects states of `feature_width` first. See `DraftModel.forward`.
        """
        hidden = batch.hidden_states
        assert hidden is not None, "a draft head needs hidden states"
        states = self.project(hidden) if hidden.shape[1] == self.feature_width else hidden
        rows, stream = self.ops.join(batch.input_ids, self.embed, states, batch.positions, self._input)
        assert stream is not None, "the stream begins with the states"
        h = self.run_layers(rows, Stream(stream), batch, wanted)
        return self.ops.norm(h, self._norm, torch.float32) if self._layout.norm_output else h


def _of_midlayer(weights: NamedTensors) -> NamedTensors:
    """The tensors, renamed as in the first release."""
    for name, tensor in weights:
        yield name.replace("layers.0.", "midlayer.", 1) if name.startswith("layers.0.") else name, tensor
