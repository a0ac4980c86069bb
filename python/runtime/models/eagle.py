"""The EAGLE-1 and EAGLE-2 draft head: decoder layers that read the token's embedding and the target's hidden state, concatenated.

Source: EAGLE, Li et al. 2024, arXiv:2401.15077; tensor names and the missing first norm follow the published
checkpoints.
"""

from __future__ import annotations

import torch

from runtime.distributed.parallel_group import ParallelGroup
from runtime.layers.draft_input import DraftInput
from runtime.layers.forward_batch import ForwardBatch
from runtime.layers.ops import Stream
from runtime.models.block import attention_specs
from runtime.models.decoder import DecoderModel
from runtime.models.draft_config import DraftConfig
from runtime.models.draft_head import DraftHead, DraftModel, OptionalTensors, shared_if_equal
from runtime.models.weights import NamedTensors

OPTIONAL = frozenset({"embed_tokens.weight", "lm_head.weight", "fc.bias"})


class LlamaForCausalLMEagle(DraftHead, DraftModel):
    """An EAGLE head as a `DraftModel`. Its hidden states approximate the target's after the final norm, so its first
    layer has no input norm, and the head has no final norm.
    Embedding and LM head are the target's, unless the checkpoint holds its own. With a token map, the LM head keeps only
    the rows of the map.

    Attributes:
        fc: embedding and hidden state [2 * hidden] -> hidden.
    """

    def __init__(
        self, config: DraftConfig, target: DecoderModel, token_map: torch.Tensor | None = None, group: ParallelGroup | None = None
    ) -> None:
        """Allocate the head.

        Args:
            token_map: int64 [Vd], the target ids that the head may propose, or None for all.
            group: the ranks that share the blocks; by default those that share the target's.
        """
        super().__init__(config.model, target, group=group)
        self.aux_layers = config.aux_layers
        self.feature_width = self.hidden_width = hidden = self.config.hidden_size
        self.hidden_dtype = target.dtype
        self._input = DraftInput()
        self.fc = self.parts.weights.linear({"fc": hidden}, 2 * hidden)
        self.layers = [self.parts.usual_block(f"layers.{i}.", i, input_norm=i > 0) for i in range(self.config.num_layers)]
        self.attention_specs = attention_specs(self.layers)
        self.keep_tokens(token_map)
        self.lm_head = self.kept_rows(target.lm_head)

    def load(self, weights: NamedTensors) -> None:
        """Fill the weights; load the target first.

        Args:
            weights: (published name, tensor of any float dtype), in any order, each once; a leading `model.` is
                ignored.

        Raises:
            ConfigError: tensors are missing, unexpected or have the wrong shape; the message names them.
        """
        optional = OptionalTensors(OPTIONAL)
        self.parts.weights.load(optional.split(weights), ("rotary_emb.inv_freq",))
        hidden, vocab = self.config.hidden_size, self.config.vocab_size
        self.embed = shared_if_equal(optional.take("embed_tokens.weight", (vocab, hidden)), self._target.embed)
        bias = optional.take("fc.bias", (hidden,))
        if bias is not None:
            self.fc.bias = bias.to(self.embed.device, self._target.dtype)
        self.lm_head = self.kept_rows(self.own_head(optional.take("lm_head.weight", (vocab, hidden))))

    def forward(self, batch: ForwardBatch, wanted: torch.Tensor | None = None) -> torch.Tensor:
        """Run the head: [T, hidden], or [N, hidden] with `wanted`, in the model's dtype. See `DraftModel.forward`."""
        assert batch.hidden_states is not None, "a draft head needs hidden states"
        rows, _ = self.ops.join(batch.input_ids, self.embed, batch.hidden_states, batch.positions, self._input)
        x = self.ops.linear(rows, self.fc)
        return self.run_layers(x, Stream(x.to(torch.float32, copy=True)), batch, wanted).to(self.hidden_dtype)
