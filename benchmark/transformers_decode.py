"""The decode rate of `transformers.generate` on the weights of a folder; other scripts run it in its own process."""

from __future__ import annotations

import argparse
import json
import time

import torch
from transformers import AutoModelForCausalLM

PROMPT_LEN = 32


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


def main() -> None:
    """Print one JSON object: {batch: tokens/s}."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--batches", type=lambda text: [int(part) for part in text.split(",")], default=[1, 8])
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model = AutoModelForCausalLM.from_pretrained(args.folder, dtype=getattr(torch, args.dtype)).to(args.device).eval()
    with torch.inference_mode():
        print(json.dumps({str(batch): tokens_per_second(model, batch, args.tokens) for batch in args.batches}))


if __name__ == "__main__":
    main()
