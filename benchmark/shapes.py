"""The benchmarked model shapes and the bytes that each step must read."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmark.machine import Machine, gpu
from benchmark.step_bytes import ModelRoof, StepBytes
from benchmark.whole_file import write_whole
from runtime.model_files.synthetic_tokenizer import write_synthetic_tokenizer

CONFIGS = Path(__file__).resolve().parent / "configs"
TARGET = CONFIGS / "llama-3-8b"
EAGLE_HEAD = CONFIGS / "llama-3-8b-eagle"

READ_BYTES_PER_SECOND = {"nvidia-h200": 4.32e12, "nvidia-h100-80gb-hbm3": 3.08e12}
"""Memory bandwidth of a GPU, measured with a kernel that only reads; other GPUs have no roof."""

_BYTES = 2  # bf16
_SEED = ("--random-seed", "1")  # for dummy weights and for requests without a seed


def read_rate(machine: Machine) -> float | None:
    """Memory bandwidth of each GPU in bytes per second; None if it was not measured."""
    return READ_BYTES_PER_SECOND.get(gpu(machine))


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a Llama-like decoder and the bytes that a decode step must read."""

    layers: int
    hidden: int
    intermediate: int
    q_heads: int
    kv_heads: int
    head_dim: int
    vocab: int

    @classmethod
    def read(cls, folder: Path) -> Shape:
        """Read the config.json of a folder."""
        raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        heads = raw["num_attention_heads"]
        return cls(
            layers=raw["num_hidden_layers"],
            hidden=raw["hidden_size"],
            intermediate=raw["intermediate_size"],
            q_heads=heads,
            kv_heads=raw["num_key_value_heads"],
            head_dim=raw.get("head_dim", raw["hidden_size"] // heads),
            vocab=raw["vocab_size"],
        )

    @property
    def layer_bytes(self) -> int:
        """Weights of one block: q, k, v, o, gate, up, down."""
        attention = self.hidden * self.head_dim * (2 * self.q_heads + 2 * self.kv_heads)
        return _BYTES * (attention + 3 * self.hidden * self.intermediate)

    @property
    def head_bytes(self) -> int:
        """Weights of the LM head."""
        return _BYTES * self.hidden * self.vocab

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values of one token in all layers."""
        return _BYTES * 2 * self.layers * self.kv_heads * self.head_dim

    @property
    def roof(self) -> ModelRoof:
        """The roof with an EAGLE head of one layer, which has an `fc` and reads the LM head in each pass."""
        fc = _BYTES * 2 * self.hidden * self.hidden
        target = StepBytes(self.layers * self.layer_bytes + self.head_bytes, None, self.kv_bytes_per_token)
        draft = StepBytes(self.layer_bytes + fc + self.head_bytes, None, self.kv_bytes_per_token / self.layers, whole=fc)
        return ModelRoof(target, draft)


def write_tiny(folder: Path, architecture: str = "LlamaForCausalLMEagle", **head_fields: Any) -> tuple[Path, Path]:
    """Write a target and a head of this architecture, small enough for smoke runs on a CPU; return their folders."""
    target: dict[str, Any] = json.loads((TARGET / "config.json").read_text(encoding="utf-8"))
    target |= {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    target |= {"num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 1024, "torch_dtype": "float32"}
    target |= {"bos_token_id": 0, "eos_token_id": 1}
    head = target | {"architectures": [architecture], "num_hidden_layers": 1} | head_fields
    for name, config in (("tiny", target), ("tiny-eagle", head)):
        write_whole(folder / name / "config.json", json.dumps(config, indent=1))
    return folder / "tiny", folder / "tiny-eagle"


@dataclass(frozen=True, slots=True)
class Model:
    """A served model: its name in the rows, the target's flags, the head's folder, and the shape if its roof is known."""

    name: str
    target_flags: tuple[str, ...]
    head: str
    shape: Shape | None

    def eagle_flags(self, accept_length: str | None, steps: int = 3, topk: int = 1, draft_tokens: int | None = None) -> tuple[str, ...]:
        """Flags for a chain of `steps` drafts or a tree with `topk` and `draft_tokens`; `accept_length` None means real acceptance."""
        architecture = json.loads((Path(self.head) / "config.json").read_text(encoding="utf-8"))["architectures"][0]
        flags = ("--speculative-algorithm", "EAGLE3" if "Eagle3" in architecture else "EAGLE", "--speculative-draft-model-path", self.head)
        flags += ("--speculative-num-steps", str(steps), "--speculative-eagle-topk", str(topk))
        flags += ("--speculative-num-draft-tokens", str(draft_tokens or steps + 1))
        if not any(Path(self.head).glob("*.safetensors")):
            flags += ("--speculative-draft-load-format", "dummy")
        return flags if accept_length is None else (*flags, "--speculative-synthetic-accept-length", accept_length)


def tiny_model() -> Model:
    """The tiny model for smoke runs on a CPU."""
    target, head = write_tiny(Path(tempfile.gettempdir()) / "talon-benchmark")
    return _tiny("tiny", target, head)


def eagle3(head: str) -> dict[str, Any]:
    """Options of `Engine` for drafts of the EAGLE-3 head in this folder."""
    return {"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": head}


@contextmanager
def engine_options(
    quick: bool, model: Mapping[str, Any], drafts: Mapping[str, Any]
) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Options of `Engine` for a model and for its drafts: the given ones, or in a quick run those of the tiny model with a tokenizer, and
    of an EAGLE-3 head for it.

    The tiny ones have random weights, and files that exist within the context.
    """
    if not quick:
        yield model, drafts
        return
    with tempfile.TemporaryDirectory() as folder:
        target, head = write_tiny(Path(folder), "LlamaForCausalLMEagle3", draft_vocab_size=512, target_hidden_size=64)
        write_synthetic_tokenizer(target, 512)
        tiny = {"model_path": str(target), "load_format": "dummy", "device": "cpu", "cpu_threads": 1, "random_seed": 1}
        yield tiny, {**eagle3(str(head)), "speculative_draft_load_format": "dummy"}


def _tiny(name: str, target: Path, head: Path) -> Model:
    flags = ("--model-path", str(target), "--load-format", "dummy", "--device", "cpu", "--max-total-tokens", "4096", *_SEED)
    return Model(name, (*flags, "--max-running-requests", "8", "--cpu-threads", "1"), str(head), None)


def big_model() -> Model:
    """The 8B shape with dummy bf16 weights."""
    flags = ("--model-path", str(TARGET), "--load-format", "dummy", "--dtype", "bfloat16", *_SEED)
    return Model("llama-3-8b", flags, str(EAGLE_HEAD), Shape.read(TARGET))


def named_model(path: str, head: str | None) -> Model:
    """The embedded model (`embedded`) or the model of a folder.

    A head without weights gets random ones; acceptance must then be synthetic. The embedded model's own head is off unless later flags
    turn it on.
    """
    flags = ("--speculative-algorithm", "none") if path == "embedded" else ("--model-path", path)
    return Model(Path(path).stem, (*flags, *_SEED), head or str(CONFIGS / "smollm2-eagle"), None)
