"""The frozen target that a head is trained on: hidden states and logits for whole batches of text."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch.nn import functional as F

from runtime.batch import ForwardMode
from runtime.config.attention_caps import AttentionCaps
from runtime.config.device_tuning import tuning_of
from runtime.config.machine import probe
from runtime.layers.attention.base import AttentionBackend, AttentionSpec
from runtime.layers.backend_selection import select_ops
from runtime.layers.forward_batch import ForwardBatch
from runtime.layers.gemm.timings import GemmTimings
from runtime.mem_cache.kv_pool import KVPool
from runtime.mem_cache.kv_spec import KVSpec
from runtime.model_executor.weight_loader import safetensors_weights
from runtime.models.config import ModelConfig
from runtime.models.registry import build_model


class SharedLayerPool(KVPool):
    """A KV pool with the keys and values of one layer per kind. Each layer overwrites those of the previous layer of its kind."""

    def __init__(self, layers: Sequence[KVSpec], num_slots: int, device: torch.device) -> None:
        kinds = list(dict.fromkeys(layers))
        super().__init__(kinds, num_slots, 1, device)
        self._kinds = [kinds.index(spec) for spec in layers]

    def flat(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The same two views [num_slots, G, key_dim] and [num_slots, G, value_dim] for all layers of a kind."""
        return super().flat(self._kinds[layer_id])


class WholeRows(AttentionBackend):
    """Causal attention of B rows of equal length, whose keys are in slots 0..T-1 of the pool."""

    caps = AttentionCaps(tree_mask=False, cuda_graph=False)

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool

    def prepare(self, batch: ForwardBatch, num_passes: int = 1) -> None:
        """Do nothing: this backend has no plan."""

    def plan_on_device(self, batch: ForwardBatch, num_passes: int = 1) -> None:
        """Do nothing."""

    def warmup_runs(self, sizes: Sequence[int], width: int, tree: bool) -> list[Callable[[], object]]:
        """Return an empty list: nothing is compiled."""
        return []

    def forward(self, q: torch.Tensor, layer: AttentionSpec, batch: ForwardBatch) -> torch.Tensor:
        """q [T, H, head_dim] -> [T, H * head_dim]."""
        B, groups = batch.batch_size, layer.num_q_heads // layer.kv.num_heads
        k, v = (
            cache[: q.shape[0]].unflatten(0, (B, -1)).transpose(1, 2).repeat_interleave(groups, 1).to(q.dtype)
            for cache in self._pool.flat(layer.layer_id)
        )
        query = q.unflatten(0, (B, -1)).transpose(1, 2)
        length = query.shape[2]
        mask = _visible(length, layer.window, q.device) if layer.sinks is not None or 0 <= layer.window < length - 1 else None
        if mask is not None and layer.sinks is not None:  # adds a key and a value of zeros; its score is the sink
            k, v, mask = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1)), _with_sinks(mask, layer.sinks)
        out = F.scaled_dot_product_attention(query, k, v, attn_mask=mask, is_causal=mask is None, scale=layer.scale)
        return out.transpose(1, 2).reshape(q.shape[0], -1)


def _visible(length: int, window: int, device: torch.device) -> torch.Tensor:
    """Which keys each query attends to, bool [L, L]."""
    ones = torch.ones((length, length), dtype=torch.bool, device=device)
    return ones.tril() if window < 0 else ones.tril() & ones.triu(-window)


def _with_sinks(visible: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """The additive mask for L keys followed by the sink: [H, L, L + 1] in the dtype of `sinks` [H]."""
    scores = torch.zeros(visible.shape, dtype=sinks.dtype, device=sinks.device).masked_fill_(~visible, float("-inf"))
    return torch.cat((scores.expand(len(sinks), -1, -1), sinks.view(-1, 1, 1).expand(-1, len(visible), 1)), dim=2)


class FrozenTarget:
    """The server's model and operations, run on padded rows. Padding is at the end, where no token attends to it.

    Attributes:
        config, device, dtype: those of the model.
        aux_layers: layers whose inputs are the features.
        embed: [V, H], shared with the head.
    """

    def __init__(
        self, folder: str, config: ModelConfig, aux_layers: tuple[int, ...], dtype: torch.dtype, device: torch.device, most_tokens: int
    ) -> None:
        ops, _ = select_ops(device, dtype, GemmTimings(tuning_of(next(iter(probe().gpus), None))))
        self.config, self.aux_layers, self.dtype, self.device = config, aux_layers, dtype, device
        self.model = build_model(config, ops, dtype, device)
        with torch.no_grad():
            self.model.load(safetensors_weights(folder))
        pool = SharedLayerPool([spec.kv for spec in self.model.attention_specs], most_tokens, device)
        self.model.bind(pool, WholeRows(pool))
        self.embed = self.model.embed

    @torch.no_grad()
    def run(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """int64 [B, L] -> features [B, L, 3 * H] and final-normed hidden states [B, L, H], both in `dtype`."""
        B, L = ids.shape
        lens = np.full(B, L, dtype=np.int32)
        batch = ForwardBatch(
            mode=ForwardMode.EXTEND,
            batch_size=B,
            tokens_per_req=0,
            input_ids=ids.reshape(-1),
            positions=torch.arange(L, device=ids.device).repeat(B),
            out_cache_loc=torch.arange(B * L, device=ids.device),
            req_pool_indices=torch.arange(B, device=ids.device),
            seq_lens=torch.full((B,), L, dtype=torch.int32, device=ids.device),
            qo_indptr=torch.arange(0, B * L + 1, L, dtype=torch.int32, device=ids.device),
            seq_len_bounds=lens,
            extend_lens=lens,
        )
        hidden, aux = self.model.forward(batch, self.aux_layers)
        assert aux is not None
        return aux.view(B, L, -1), hidden.view(B, L, -1)

    @torch.no_grad()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[N, H] -> float32 [N, V]."""
        return self.model.logits(hidden)
