"""Operations of latent and of gated attention between their GEMMs on a CUDA GPU."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from runtime.config.kernel_configs import FragmentConfig, FullyResidentConfig, ResidentConfig
from runtime.layers.attention.base import AttentionSpec
from runtime.layers.attention.kernels import absorb_queries, absorbed_gemms
from runtime.layers.forward_batch import ForwardBatch
from runtime.layers.gemm.deferred_norm import DeferredNorm
from runtime.layers.gemm.few_rows_output import MAX_ROWS
from runtime.layers.gemm.timings import GemmChoice
from runtime.layers.kernels.latent_rows import rotate_heads, write_latent
from runtime.layers.latent_heads import LatentHeads, NewRows
from runtime.layers.linear import Linear
from runtime.layers.norm import RMSNorm
from runtime.layers.pass_context import PassContext
from runtime.layers.rope import Rope


def prepared_queries(choice: GemmChoice, linear: Linear, rows: int, q_norm: RMSNorm) -> DeferredNorm | None:
    """Buffers for a norm of the first columns of a GEMM's output; None if the chosen kernel cannot prepare it.

    Like other deferred norms, only in bfloat16, because float16 has too small a range.
    """
    gain = q_norm.weight
    if not isinstance(choice, FragmentConfig | ResidentConfig | FullyResidentConfig) or rows > MAX_ROWS or gain.dtype is not torch.bfloat16:
        return None
    if isinstance(choice, FullyResidentConfig) and choice.tall > 1:  # its blocks sum the squares of several units together
        return None
    own = linear.out_features // choice.parts(linear.out_features)  # columns of a block
    if len(gain) % own:
        return None
    scaled = torch.empty((rows, len(gain)), dtype=gain.dtype, device=gain.device)
    return DeferredNorm(gain, scaled, torch.empty((rows, len(gain) // own), device=gain.device))


class CudaLatentOps:
    """The part of `CudaOps` for latent and gated attention. `pdl`: as there."""

    pdl: bool

    def gate(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """`x` times the sigmoid of `gate`, in the storage of `x`."""
        return x.mul_(gate.sigmoid())

    def write_latent(
        self, rows: torch.Tensor, heads: LatentHeads, layer_id: int, context: PassContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Norm the latents, rotate the shared key, write the latent KV rows; returns the queries' columns and the KV rows."""
        batch = context.batch
        return write_latent(rows, heads, batch.positions, batch.out_cache_loc, context.kv_pool.flat(layer_id)[0], self.pdl)

    def rotate(self, x: torch.Tensor, rope: Rope, positions: torch.Tensor, out: torch.Tensor) -> None:
        """Rotate `x` [T, H, rope.dim] into `out`."""
        rotate_heads(x, rope, positions, out, self.pdl)

    def absorb(
        self, q: torch.Tensor, heads: LatentHeads, key: torch.Tensor, positions: torch.Tensor, in_prompt: bool = False
    ) -> torch.Tensor:
        """Queries over latent rows, [T, H, row_dim]."""
        return absorbed_gemms.absorb(q, heads, key, positions, self.pdl)

    def absorb_and_write(
        self, q: torch.Tensor, heads: LatentHeads, key: torch.Tensor, positions: torch.Tensor, new: NewRows
    ) -> torch.Tensor | None:
        """`absorb` and the KV rows in one kernel, for few tokens in bfloat16."""
        if not (absorb_queries.supports(q, heads, key) and absorb_queries.can_write(new, heads)):
            return None
        return absorb_queries.absorb_queries(q, heads, key, positions, new, pdl=self.pdl)

    def project_values(self, attended: torch.Tensor, value: torch.Tensor, in_prompt: bool = False) -> torch.Tensor:
        """Values of each head, [T, H, value_dim]."""
        return absorbed_gemms.project(attended, value, self.pdl)

    def prompt_attention(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: AttentionSpec, batch: ForwardBatch
    ) -> torch.Tensor:
        """Causal attention of whole prompts, one after another: [T, H, value_dim]. The kernel needs keys and values of equal width."""
        assert batch.extend_lens is not None, "a pass of prompts"
        value_dim = v.shape[2]
        v = F.pad(v, (0, q.shape[2] - value_dim)) if value_dim < q.shape[2] else v
        parts = zip(*(x.transpose(0, 1).split(batch.extend_lens.tolist(), dim=1) for x in (q, k, v)), strict=True)
        outs = [F.scaled_dot_product_attention(*(x[None] for x in one), is_causal=True, scale=layer.scale)[0] for one in parts]
        return torch.cat(outs, dim=1).transpose(0, 1)[..., :value_dim]
