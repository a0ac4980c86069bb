"""A kind of split-KV pass: its sizes, and the number of programs over which its keys are split."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import triton

from runtime.config.kernel_configs import SplitConfig
from runtime.layers.attention.kernels.split_schedule import MAX_SHARES, WorkSchedule, order_requests, schedule_shares

MAX_WIDTH = 16
"""Maximum queries per request."""
MAX_ROWS = 128
"""Maximum queries times query heads per KV head."""
BLOCK_ROWS, WIDE_BLOCK_ROWS = 64, 32
"""Maximum rows per program, for head dimensions up to 256 and above."""
MAX_SPLITS = MAX_SHARES
MAX_ROTATED = 1 << 14
"""Maximum number of values in a pass's new keys for which rotating them in the attention kernel is as fast as in a separate kernel."""


def supports(width: int, num_q_heads: int, num_kv_heads: int) -> bool:
    """Whether the kernel supports passes of `width` queries per request."""
    return 0 < width <= MAX_WIDTH and width * (num_q_heads // num_kv_heads) <= MAX_ROWS


@dataclass(frozen=True, slots=True)
class SplitShape:
    """A kind of pass: everything except its lengths.

    Attributes:
        batch, width: requests, including padding, and queries per request.
        num_q_heads, num_kv_heads, head_dim: H, G, D; D is 64, 128, 256 or 512.
        num_sms: SMs of the device.
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
    def block_rows(self) -> int:
        """Rows per program, at least the 16 of a tensor-core tile."""
        return max(min(self.rows, BLOCK_ROWS if self.head_dim <= 256 else WIDE_BLOCK_ROWS), 16)

    @property
    def parts(self) -> int:
        """KV heads times the programs over which the rows of one head are split."""
        return max(self.rows // self.block_rows, 1) * self.num_kv_heads

    @property
    def splits(self) -> int:
        """Programs per request and part. Independent of lengths, so a captured grid is valid for all."""
        if self.config.whole:
            return 1
        wanted = self.config.programs_per_sm * self.num_sms // (self.batch * self.parts)
        return max(min(wanted, MAX_SPLITS, self.config.max_partial_rows // self.rows), 1)

    @property
    def partial_rows(self) -> int:
        """Rows of all partial results of a pass; 0 if one program processes all keys of a request."""
        shares = self.splits + 1 if self.config.scheduled else self.splits
        return self.batch * self.num_kv_heads * shares * self.rows if shares > 1 else 0

    @property
    def rotates(self) -> bool:
        """Whether a kernel that can rotate the pass's new heads should do so."""
        return self.batch * self.width * self.num_kv_heads * self.head_dim <= MAX_ROTATED

    def empty_schedule(self, device: torch.device) -> WorkSchedule | None:
        """Buffers for `fill_schedule`; None if every request has its own `splits` programs."""
        if not self.config.ordered:
            return None
        return WorkSchedule.empty(self.batch, self.parts, 0 if self.config.whole else self.splits, device)

    def fill_schedule(self, lens: torch.Tensor, schedule: WorkSchedule | None) -> None:
        """Compute the schedule of a pass over requests of lens int32 [B], if it has one. Can be captured."""
        if schedule is None:
            return
        if self.config.whole:
            order_requests(lens, self.config.tile, schedule.items)
        else:
            schedule_shares(lens, self.splits, self.config.tile, schedule)


def one_of_each_kernel(shapes: Iterable[SplitShape]) -> list[SplitShape]:
    """One of `shapes` for each kernel to compile."""
    return list({(shape.config, shape.width, triton.next_power_of_2(shape.splits), shape.rotates): shape for shape in shapes}.values())
