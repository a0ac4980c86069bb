"""A GEMM with its epilogue, by the kernel that was chosen for it."""

from __future__ import annotations

import torch

from runtime.config.kernel_configs import FragmentConfig, FullyResidentConfig, ResidentConfig, TritonConfig
from runtime.layers.gemm.epilogue import Epilogue
from runtime.layers.gemm.fragment_gemm import fragment_gemm
from runtime.layers.gemm.fully_resident_gemm import fully_resident_gemm
from runtime.layers.gemm.resident_gemm import resident_gemm
from runtime.layers.gemm.timings import GemmKernel
from runtime.layers.gemm.triton_gemm import triton_gemm
from runtime.layers.gemm.wgmma_gemm import WgmmaConfig, wgmma_gemm
from runtime.layers.gemm.widening_gemm import widening_gemm
from runtime.layers.linear import Linear


def fused_gemm(x: torch.Tensor, linear: Linear, out: torch.Tensor | None, choice: GemmKernel, epilogue: Epilogue, pdl: bool) -> None:
    """`out = epilogue(x @ weight.T)`; arguments are as in the kernels, except that `x` may be a view."""
    # An epilogue scales whole rows, so the order of the columns does not matter to it.
    x, weight, scale = linear.storage.in_order(x).contiguous(), linear.weight, linear.storage.scale
    if isinstance(choice, TritonConfig):
        triton_gemm(x, weight, out, choice, epilogue, weight_scale=scale, pdl=pdl)
    elif isinstance(choice, WgmmaConfig):
        wgmma_gemm(x, weight, out, choice, epilogue, pdl=pdl)
    elif isinstance(choice, ResidentConfig):
        assert out is not None, "the GEMM with resident weights has no argmax"
        resident_gemm(x, weight, out, choice, epilogue, pdl=pdl)
    elif isinstance(choice, FullyResidentConfig):
        assert out is not None, "the GEMM with fully resident weights has no argmax"
        assert scale is not None, "the GEMM with fully resident weights needs e4m3 weights"
        fully_resident_gemm(x, weight, out, choice, epilogue, weight_scale=scale, pdl=pdl)
    else:
        assert out is not None, "fragment GEMMs have no argmax"
        assert scale is not None, "fragment GEMMs need e4m3 weights"
        if isinstance(choice, FragmentConfig):
            fragment_gemm(x, weight, out, choice, epilogue, weight_scale=scale, pdl=pdl)
        else:
            widening_gemm(x, weight, out, choice, epilogue, weight_scale=scale, pdl=pdl)
