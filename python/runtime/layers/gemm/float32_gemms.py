"""Whether torch multiplies 16-bit matrices into float32."""

from __future__ import annotations

import logging

import torch
from torch.nn import functional as F

log = logging.getLogger(__name__)
PROBE_TOLERANCE = 1e-2


def has_float32_gemms() -> bool:
    """Whether this torch supports bfloat16 GEMMs with float32 output, also added to a float32 tensor; otherwise results are rounded
    first.
    """
    x = torch.randn((16, 64), device="cuda").to(torch.bfloat16)
    h = torch.randn((16, 16), device="cuda")
    expected = h + F.linear(x.float(), x.float())
    try:
        torch.ops.aten.addmm.dtype_out(h, x, x.t(), torch.float32, out=h)
        alone = torch.ops.aten.mm.dtype_out(x, x.t(), torch.float32, out=torch.empty_like(h))
    except (AttributeError, RuntimeError) as error:
        log.warning("this torch has no 16-bit GEMM with float32 output (%s): residual updates and logits are rounded once more", error)
        return False
    close = torch.allclose(h, expected, rtol=PROBE_TOLERANCE, atol=PROBE_TOLERANCE)
    return close and torch.allclose(alone, F.linear(x.float(), x.float()), rtol=PROBE_TOLERANCE, atol=PROBE_TOLERANCE)
