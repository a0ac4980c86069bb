"""Random arrivals, idle groups, aborts and long prompts against a server of attention groups: no hang, and the text of one group.

    PYTHONPATH=python:test python -m process.group_storm --seconds 600 --groups 4

prints one JSON line: what was asked and answered, how often a group was idle beside a busy one, and what went wrong.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import torch
from safetensors.torch import save_file

from process import rank_faults
from process.fake import Server, serving
from process.rank_storm import PATIENCE, kill, leaked
from runtime.layers.torch_ops import TorchOps
from runtime.managers.messages import GenerateReq
from runtime.model_executor.build import build_worker
from runtime.models.mtp import MtpDraft
from runtime.models.registry import build_model, load_hf_config
from runtime.sampling_params import SamplingParams
from unit.small_tokenizer import write_small_tokenizer
from unit.test_served_speculation import serve
from unit.tiny import tiny_runtime

CONTEXT, VOCAB, LONGEST = 512, 1024, 40
"""`LONGEST`: output tokens of a request at most."""
PAUSE, MIN_IDLE = 0.05, 1 / 3
"""Seconds between two looks at the groups, and the least share of looks at a busy server in which some groups are idle."""
CLEAR = 1e-3
"""Prompts are left out where two tokens are closer than this in log-probability: partial sums of ranks round differently."""
GAINS = {"o_proj": 0.3, "down_proj": 0.3, "lm_head": 4.0, "embed_tokens": 8.0}
"""A text that goes by its last token most, and by all others."""
FLAGS = ["--enable-dp-attention", "--load-format=auto", "--dtype=float32", "--cpu-threads=1", "--speculative-algorithm=MTP"]
FLAGS += ["--max-total-tokens=1600", "--skip-server-warmup"]
FIGURES = ("spec_accept_length", "spec_depth_steps_total", "num_retracted_requests_total", "cached_tokens_total")
FIGURES += ("generation_tokens_total", "num_failed_steps_total")
CONFIG: dict[str, Any] = dict(
    architectures=["DeepseekV3ForCausalLM"], model_type="deepseek_v3", vocab_size=VOCAB, hidden_size=64, intermediate_size=128,
    num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=4, q_lora_rank=24, kv_lora_rank=16, qk_rope_head_dim=8,
    qk_nope_head_dim=16, v_head_dim=12, moe_intermediate_size=32, n_routed_experts=8, num_experts_per_tok=2, routed_scaling_factor=1.5,
    n_shared_experts=1, first_k_dense_replace=1, n_group=2, topk_group=1, norm_topk_prob=True, scoring_func="sigmoid",
    topk_method="noaux_tc", num_nextn_predict_layers=1, rms_norm_eps=1e-5, rope_theta=10000.0, max_position_embeddings=CONTEXT,
    eos_token_id=1, bos_token_id=0, tie_word_embeddings=False, torch_dtype="float32", hidden_act="silu",
)  # fmt: skip


def checkpoint(folder: Path) -> Path:
    """A tiny DeepSeek-V3 with experts, and an MTP layer that often guesses right."""
    folder.mkdir(parents=True)
    write_small_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    target = build_model(load_hf_config(folder), TorchOps(), torch.float32, torch.device("cpu"))
    shapes = target.expected_weights() | MtpDraft(target).expected_weights()
    g = torch.Generator().manual_seed(1)
    tensors = {name: torch.randn(shape, generator=g) * shape[-1] ** -0.5 for name, shape in shapes.items()}
    tensors |= {name: torch.ones(shape) for name, shape in shapes.items() if len(shape) == 1 and "norm" in name}
    for name, tensor in tensors.items():
        tensor.mul_(next((gain for part, gain in GAINS.items() if part in name), 1.0))
        if "eh_proj" in name:
            tensor[:, : len(tensor)] = torch.eye(len(tensor))
    save_file(tensors, folder / "model.safetensors")
    return folder


@dataclass
class Texts:
    """Prompts, some with a common beginning and a few long, and the text of one group for each."""

    prompts: list[list[int]]
    expected: list[list[int]]

    @classmethod
    def of(cls, model: Path, count: int, rng: random.Random) -> Texts:
        """Those of a worker in this process, without groups and without drafts."""
        stem = [rng.randrange(2, VOCAB) for _ in range(120)]
        prompts = [
            stem[: rng.choice((0, 40, 120))] + [rng.randrange(2, VOCAB) for _ in range(rng.choice((3, 20, 300)))] for _ in range(count)
        ]
        greedy = SamplingParams(temperature=0.0, max_new_tokens=LONGEST, ignore_eos=True)
        asks = [GenerateReq(rid=str(i), input_ids=ids, sampling=greedy, seed=0, top_logprobs=2) for i, ids in enumerate(prompts)]
        margins = [1.0] * count

        def hear(out: Any) -> None:
            for tops in out.logprobs.top if out.logprobs else []:
                margins[int(out.rid)] = min(margins[int(out.rid)], tops[0][1] - tops[1][1])

        config = tiny_runtime(model_path=str(model), load_format="safetensors", context_length=CONTEXT, max_total_tokens=8192)
        worker = build_worker(config, load_hf_config(model))
        texts, _ = serve(worker, asks, {}, hear=hear, context_length=CONTEXT)
        worker.close()
        clear = [i for i in range(count) if margins[i] > CLEAR]
        return cls([prompts[i] for i in clear], [texts[str(i)] for i in clear])


@dataclass
class Traffic:
    """Requests of random size at random times, each on a thread of its own."""

    server: Server
    texts: Texts
    asked: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    samples: Counter[str] = field(default_factory=Counter)
    threads: list[threading.Thread] = field(default_factory=list)
    depths: int = 0

    def run(self, seconds: float, rng: random.Random, least: float) -> None:
        """Send bursts of random size. The next one waits until few requests are left, so that groups become idle.

        After `least` seconds, end as soon as drafts had two depths.
        """
        start = time.monotonic()
        end = start + seconds
        while time.monotonic() < (end if self.depths < 2 else start + least):
            for _ in range(rng.choice((1, 2, 3, 6, 32))):
                index, count = rng.randrange(len(self.texts.prompts)), rng.randint(1, LONGEST)
                target = self.leave if rng.random() < 0.1 else self.ask
                self.threads.append(threading.Thread(target=target, args=(index, count), daemon=True))
                self.threads[-1].start()
            left = rng.choice((0, 1, 2, 6))
            while len(self.threads) > left and time.monotonic() < end:
                time.sleep(PAUSE)
                self.sample()
                self.threads = [thread for thread in self.threads if thread.is_alive()]
        for thread in self.threads:
            thread.join(PATIENCE)
        self.wrong += ["a request got no answer"] * sum(thread.is_alive() for thread in self.threads)

    def ask(self, index: int, count: int) -> None:
        """A request, whose text must be that of one group."""
        try:
            done = httpx.post(f"{self.server.url}/v1/completions", json=self.body(index, count), timeout=PATIENCE, verify=False)
        except httpx.HTTPError as error:
            self.wrong.append(f"prompt {index}: {error!r}")
            return
        found = done.json()["choices"][0]["token_ids"] if done.status_code == 200 else done.text
        if found != self.texts.expected[index][:count]:
            self.wrong.append(f"prompt {index}, {count} tokens: {found}")
        self.asked["answered"] += 1

    def leave(self, index: int, count: int) -> None:
        """A stream that its client leaves after its first events."""
        with httpx.stream(
            "POST", f"{self.server.url}/v1/completions", json=self.body(index, count) | {"stream": True}, timeout=PATIENCE
        ) as response:
            for event, _ in enumerate(response.iter_lines()):
                if event > 3:
                    break
        self.asked["left"] += 1

    def sample(self) -> None:
        """Note which groups are busy now."""
        state = httpx.get(f"{self.server.url}/get_server_info", timeout=PATIENCE, verify=False).json()["internal_states"][0]
        self.depths = len(state["spec_depth_steps_total"])
        running = [group["num_running_reqs"] for group in state["groups"]]
        busy = sum(count > 0 for count in running)
        self.samples["all busy" if busy == len(running) else "some idle" if busy else "all idle"] += 1

    def body(self, index: int, count: int) -> dict[str, Any]:
        """A greedy request."""
        wanted = {"max_tokens": count, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        return {"prompt": self.texts.prompts[index], **wanted}


def storm(
    seconds: float, groups: int = 4, seed: int = 0, device: str = "cpu", steps: str = "auto", least: float | None = None
) -> dict[str, Any]:
    """Serve and ask for so many seconds, then kill a process of the server. `least`: seconds after which two depths suffice."""
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as temp:
        model = checkpoint(Path(temp) / "tiny")
        texts = Texts.of(model, 24, rng)
        flags = [f"--{name}={groups}" for name in ("tp-size", "dp-size", "ep-size")]
        flags += [*FLAGS, f"--device={device}", f"--speculative-num-steps={steps}"]
        with serving(model, *flags, behaviour="well", program=rank_faults.__file__) as server:
            traffic = Traffic(server, texts)
            traffic.run(seconds, rng, seconds if least is None else least)
            wrong = traffic.wrong + list(filter(None, [leaked(server)]))
            state, metrics = server.state(), server.get("/metrics").text
            if httpx.post(f"{server.url}/flush_cache", timeout=PATIENCE).status_code != 200 or server.get("/health").status_code != 200:
                wrong.append("the cache was not flushed, or the server is not healthy")
            wrong += [] if f'talon:group_running_reqs{{group="{groups - 1}"' in metrics else ["/metrics has no requests by group"]
            wrong += filter(None, [kill(server, rng)])
    figures = {name: state[name] for name in FIGURES}
    return {"prompts": len(texts.prompts), **traffic.asked, "samples": dict(traffic.samples), **figures, "wrong": wrong}


def main() -> int:
    """Run the storm; exit 1 if anything went wrong, or groups were seldom idle beside busy ones."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    args = parser.parse_args()
    outcome = storm(args.seconds, args.groups, args.seed, args.device)
    print(json.dumps(outcome))
    samples = outcome["samples"]
    seldom_idle = samples.get("some idle", 0) < MIN_IDLE * (sum(samples.values()) - samples.get("all idle", 0))
    return 1 if outcome["wrong"] or seldom_idle else 0


if __name__ == "__main__":
    sys.exit(main())
