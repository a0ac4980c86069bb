"""A kind of split-KV pass: its sizes, and how many programs share its keys."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import triton

from runtime.config.kernel_configs import SplitConfig
from runtime.layers.attention.kernels.split_schedule import MAX_SHARES, WorkSchedule

MAX_WIDTH = 8
"""Most queries per request."""
MAX_ROWS = 64
"""Most queries times query heads per KV head."""
MAX_SPLITS = MAX_SHARES


def supports(width: int, num_q_heads: int, num_kv_heads: int) -> bool:
    """Whether the kernel supports passes of `width` queries per request."""
    return 0 < width <= MAX_WIDTH and width * (num_q_heads // num_kv_heads) <= MAX_ROWS


@dataclass(frozen=True, slots=True)
class SplitShape:
    """A kind of pass: everything except its lengths.

    Attributes:
        batch, width: requests, padding included, and queries per request.
        num_q_heads, num_kv_heads, head_dim: H, G, D; D is 64, 128 or 256.
        num_sms: multiprocessors of the device.
        config: how the work is split.
    """

    batch: int
    width: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    num_sms: int
    config: SplitConfig

    @property
    def rows(self) -> int:
        """Rows of a partial result: queries times heads of a group, rounded up to a power of two."""
        return triton.next_power_of_2(self.width * (self.num_q_heads // self.num_kv_heads))

    @property
    def splits(self) -> int:
        """Programs per request and KV head. They do not depend on lengths, so a captured grid holds for all of them."""
        wanted = self.config.programs_per_sm * self.num_sms // (self.batch * self.num_kv_heads)
        return max(min(wanted, MAX_SPLITS, self.config.max_partial_rows // self.rows), 1)

    @property
    def programs(self) -> int:
        """Programs per KV head of a scheduled pass: as many as the device runs at once."""
        return max(self.config.programs_per_sm * self.num_sms // self.num_kv_heads, 1)

    @property
    def partial_rows(self) -> int:
        """Rows of all partial results of a pass; 0 if one program takes all keys of a request."""
        shares = self.splits + 1 if self.config.scheduled else self.splits
        return self.batch * self.num_kv_heads * shares * self.rows if shares > 1 else 0

    def empty_schedule(self, device: torch.device) -> WorkSchedule | None:
        """Buffers for `schedule_work`; None if every request has `splits` programs of its own."""
        return WorkSchedule.empty(self.batch, self.num_kv_heads, self.splits, device) if self.config.scheduled else None


def one_of_each_kernel(shapes: Iterable[SplitShape]) -> list[SplitShape]:
    """One of `shapes` for each kernel that has to be compiled."""
    return list({(shape.config, shape.width, triton.next_power_of_2(shape.splits)): shape for shape in shapes}.values())
