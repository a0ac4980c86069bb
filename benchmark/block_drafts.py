"""Throughput of Gemma 4's 31B shape with random weights, plain and with DFlash's blocks at forced accept lengths, against the roof."""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmark import picture, plots
from benchmark.markdown import Result, percent, provenance, table
from benchmark.record import Record
from benchmark.shapes import CONFIGS
from benchmark.sweep import Setup, arguments, names, numbers, random_ids, sweep
from runtime.layers.torch_ops import TorchOps
from runtime.models.dflash import DFlashDraftModel
from runtime.models.draft_config import load_draft_config
from runtime.models.registry import build_model, load_hf_config

NAME = "block_drafts"
KEYS = ("mode", "concurrency", "input_len", "output_len")
TARGET, DRAFT = CONFIGS / "gemma-4-31b", CONFIGS / "gemma-4-31b-dflash"
MODES = {"plain": None, "accept-3": "3", "accept-5": "5", "accept-7": "7"}
"""Accept length that is forced, by mode."""
STEPS = 15
FEW = (
    "--max-running-requests",
    "16",
    "--cuda-graph-max-bs",
    "16",
    "--context-length",
    "4096",
    "--disable-radix-cache",
    "--random-seed",
    "1",
)
"""Flags of all servers: the logits of a block of 16 tokens take 16 MiB a request."""


@dataclass(frozen=True, slots=True)
class BlockRoof:
    """The limit of a target with a draft of blocks: every weight is read once an iteration, the shared head twice.

    Attributes:
        target, draft: bytes of the weights that a pass reads, with the head.
        kv: for each attention layer of the target, bytes per token and the tokens it keeps; -1 for all.
    """

    target: int
    draft: int
    kv: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, target: Path, draft: Path) -> BlockRoof:
        """The shapes of two folders."""
        model = build_model(load_hf_config(target), TorchOps(), torch.bfloat16, torch.device("meta"))
        block = DFlashDraftModel(load_draft_config(draft, "DFLASH", model.config), model)
        head = 2 * model.lm_head.num_parameters
        kv = tuple((spec.kv.bytes_per_slot, spec.window) for spec in model.attention_specs)
        blocks = sum(layer.active_parameters for layer in block.layers) + block.fc.num_parameters
        return cls(2 * model.active_parameters + head, 2 * blocks + head, kv)

    def roof_ms(self, steps: int, batch: int, context: float, bytes_per_second: float) -> float:
        """Milliseconds of an iteration of `steps` drafts, or of a plain step, by its bytes alone."""
        kv = sum(size * (context if window < 0 else min(context, window + 1)) for size, window in self.kv)
        return (self.target + (self.draft if steps else 0) + batch * kv) / bytes_per_second * 1000


def render(result: Result) -> str:
    """One table."""
    return f"{summary(result)}\n\nTalon: {provenance(result)}"


def summary(result: Result) -> str:
    """The table alone."""
    columns = sorted({row["concurrency"] for row in result["rows"]})
    by = {(row["mode"], row["concurrency"]): row for row in result["rows"]}
    lines = [[_title(mode), *(_cell(by.get((mode, c))) for c in columns)] for mode in MODES if any(key[0] == mode for key in by)]
    return f"Output tok/s (share of the roof), {STEPS} drafts per block.\n\n{table(['', *(f'c={c}' for c in columns)], lines)}"


def _title(mode: str) -> str:
    return "plain" if MODES[mode] is None else f"DFlash, forced accept length {MODES[mode]}"


def _cell(row: dict[str, Any] | None) -> str | None:
    if row is None:
        return None
    share = f" ({percent(row['roof_share'])})" if row.get("roof_share") else ""
    return f"{row['output_throughput']:.0f}{share}"


def plot(result: Result, file: Path) -> None:
    """Throughput by concurrency."""
    groups: dict[str, dict[str, float | None]] = {}
    for row in sorted(result["rows"], key=lambda row: row["concurrency"]):
        groups.setdefault(str(row["concurrency"]), {})[_title(row["mode"])] = row["output_throughput"]
    panel = plots.bars(groups, "Gemma 4 31B, bf16", "output tokens/s", kind="concurrency")
    picture.draw(result, file, "Blocks of drafts", [panel], columns=1)


def setups(modes: list[str], target: Path, draft: Path, steps: int, flags: tuple[str, ...]) -> list[Setup]:
    """One server per mode."""
    found = []
    for mode in modes:
        drafts = ("--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", str(draft))
        forced = ("--speculative-num-steps", str(steps), "--speculative-synthetic-accept-length", MODES[mode] or "")
        labels = {"mode": mode, "steps": 0 if MODES[mode] is None else steps}
        more = () if MODES[mode] is None else (*drafts, *forced)
        found.append(Setup(labels, ("--model-path", str(target), "--load-format", "dummy", *flags, *more)))
    return found


def tiny(folder: Path) -> tuple[Path, Path]:
    """The same shapes, tiny, for smoke runs on a CPU."""
    sizes: dict[str, Any] = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 1024}
    target = json.loads((TARGET / "config.json").read_text(encoding="utf-8")) | {"dtype": "float32", "eos_token_id": 1}
    kinds = ["sliding_attention", "sliding_attention", "full_attention"]
    target["text_config"] |= sizes | {"num_global_key_value_heads": 1, "global_head_dim": 32, "num_hidden_layers": 3, "layer_types": kinds}
    draft = json.loads((DRAFT / "config.json").read_text(encoding="utf-8")) | sizes | {"num_hidden_layers": 1, "dtype": "float32"}
    draft["dflash_config"] |= {"target_layer_ids": [0, 1]}
    for name, config in (("tiny-gemma", target), ("tiny-dflash", draft)):
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    return folder / "tiny-gemma", folder / "tiny-dflash"


def main() -> None:
    """Measure, record and plot."""
    parser = arguments(__doc__)
    parser.add_argument("--modes", type=names, default=list(MODES), help=f"of {', '.join(MODES)}")
    parser.add_argument("--concurrency", type=numbers, default=[1])
    parser.add_argument("--output-len", type=int, default=1000)
    parser.add_argument("--flags", type=str.split, default=[], help="more flags of every server, in one argument")
    args = parser.parse_args()
    record = Record(NAME, KEYS, args.out, args.quick)
    if args.quick:
        folders = tiny(Path(tempfile.gettempdir()) / "talon-benchmark")
        flags = ("--device", "cpu", "--max-total-tokens", "4096", "--max-running-requests", "8", "--cpu-threads", "1")
        sweep(record, setups(["plain", "accept-3"], *folders, STEPS, (*flags, *args.flags)), [random_ids(1, 16, 8)])
    else:
        bursts = [random_ids(c, 1000, args.output_len) for c in args.concurrency]
        flags = ("--dtype", "bfloat16", *FEW, *args.flags)
        sweep(record, setups(args.modes, TARGET, DRAFT, STEPS, flags), bursts, BlockRoof.of(TARGET, DRAFT))
    plot(record.data, record.file.with_suffix(".png"))
    print(render(record.data))


if __name__ == "__main__":
    main()
