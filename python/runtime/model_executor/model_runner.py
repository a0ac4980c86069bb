"""One model on the device: its weights, its KV pool and its attention backend."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from runtime.batch import ForwardMode
from runtime.config.device_tuning import DeviceTuning
from runtime.distributed.parallel_group import ALONE, ParallelGroup
from runtime.layers.attention.base import AttentionBackend, AttentionShape, plan_pass
from runtime.layers.attention.kernel_choices import KernelChoices
from runtime.layers.attention.registry import build_backend
from runtime.layers.attention.self_check import check_backend
from runtime.layers.forward_batch import ForwardBatch
from runtime.mem_cache.kv_pool import KVPool, PageTable
from runtime.mem_cache.state_pool import StatePool
from runtime.model_executor.output_arena import OutputArena
from runtime.models.decoder import DecoderModel, States


class ModelRunner:
    """Owner of a model's weights, KV pool and backend. Target and draft model have one each and share the page table.

    Attributes:
        arena: memory for the outputs of the model's graph runners.
        states: the recurrent states of the model's linear-attention layers; None without such layers.
        prompt_sizes: tokens of the passes over one prompt that have graphs, smallest first.
    """

    def __init__(
        self,
        model: DecoderModel,
        attention: str,
        dtype: torch.dtype,
        device: torch.device,
        prompt_sizes: Sequence[int] = (),
        group: ParallelGroup = ALONE,
        *,
        tuning: DeviceTuning,
    ) -> None:
        self.model, self.config, self.attention = model, model.config, attention
        self.dtype, self.device, self.prompt_sizes = dtype, device, list(prompt_sizes)
        self.arena = OutputArena(device)
        self._tuning, self._choices = tuning, KernelChoices(group)
        self.kv_pool: KVPool
        self.states: StatePool | None
        self.backend: AttentionBackend

    @property
    def bytes_per_slot(self) -> int:
        """KV bytes of one position, all layers."""
        return sum(layer.kv.bytes_per_slot for layer in self.model.attention_specs)

    @property
    def state_bytes(self) -> int:
        """Bytes of all recurrent states."""
        return 0 if self.states is None else self.states.num_bytes

    def allocate(self, num_pages: int, page_table: PageTable, max_batch_size: int, max_width: int, cached_states: int = 0) -> None:
        """Make the KV pool, the recurrent states and the backend for passes of this size, and bind them to the model.

        `cached_states`: recurrent states of cached prefixes.
        """
        self._page_table = page_table
        specs, rows = self.model.state_specs, len(page_table.pages)
        self.states = StatePool(specs, rows, max_width, self.device, cached_states) if specs else None
        self._shape = AttentionShape(
            layers=self.model.attention_specs,
            max_batch_size=max_batch_size,
            max_tokens_per_req=max_width,
            max_context_len=page_table.max_pages * page_table.page_size,
            max_prompt=max(self.prompt_sizes, default=0),
            tuning=self._tuning,
            choices=self._choices,
            dtype=self.dtype,
        )
        check_backend(self.attention, self._shape, page_table.page_size, self.device)
        self.resize(num_pages)

    def resize(self, num_pages: int) -> None:
        """Replace the KV pool and the backend: dry runs use a small pool."""
        self.kv_pool = KVPool([layer.kv for layer in self._shape.layers], num_pages, self._page_table.page_size, self.device)
        self.backend = build_backend(self.attention, self._shape, self.kv_pool, self._page_table)
        self.model.bind(self.kv_pool, self.backend, self.states)

    def extend(self, batch: ForwardBatch, aux_layers: tuple[int, ...] = (), wanted: torch.Tensor | None = None) -> States:
        """Plan and run an EXTEND batch eagerly; arguments and results as for `DecoderModel.forward`."""
        assert batch.mode is ForwardMode.EXTEND
        plan_pass(self.backend, batch)
        return self.model.forward(batch, aux_layers, wanted)
