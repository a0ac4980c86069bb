"""The decode rate of `transformers.generate` on the weights of a folder."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from benchmark.server import apart

PROMPT_LEN = 32


def decode_rates(
    folder: str, batches: Sequence[int], tokens: int, threads: int, device: str = "cpu", dtype: str = "float32"
) -> list[float]:
    """Tokens per second of greedy `generate` at each batch size, measured in its own process."""
    return apart(_rates, folder=folder, batches=batches, tokens=tokens, threads=threads, device=device, dtype=dtype)


def _rates(folder: str, batches: Sequence[int], tokens: int, threads: int, device: str, dtype: str) -> list[float]:
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).to(device).eval()
    with torch.inference_mode():
        return [tokens_per_second(model, batch, tokens) for batch in batches]


def tokens_per_second(model: torch.nn.Module, batch: int, tokens: int) -> float:
    """The decode rate of greedy `generate` for a batch. The time of a run with one token is subtracted, because it is mostly prefill."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(100, 40000, (batch, PROMPT_LEN), generator=generator).to(next(model.parameters()).device)
    mask = torch.ones_like(ids)

    def seconds(count: int) -> float:
        started = time.perf_counter()
        model.generate(ids, attention_mask=mask, max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0)  # type: ignore[operator]
        if ids.is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - started

    seconds(4)
    return batch * (tokens - 1) / (seconds(tokens) - seconds(1))
