"""The three phases of training a head: generate data, train, evaluate. Each can be interrupted and resumed."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from benchmark.machine import commit, describe, portable

from eagle_training.batches import make_batch
from eagle_training.conversations import Conversation, ShardFolder
from eagle_training.curves import draw_curves
from eagle_training.evaluation import CHAT_PROMPTS, EVERYDAY, NO_TEMPLATES, TEMPLATES, Shape, measure, read_prompts, table
from eagle_training.head import EagleHead, aux_json, head_config
from eagle_training.model_card import SAME, model_card
from eagle_training.synthesis import Amount, enough, key_of, synthesize, train_tokens
from eagle_training.target import FrozenTarget
from eagle_training.trainer import Course, Trainer
from eagle_training.vocabulary import answer_counts, coverage, pick_vocabulary
from runtime import Engine
from runtime.config.flag_parser import from_fields
from runtime.config.resolve import check
from runtime.errors import ConfigError
from runtime.json_file import read_object
from runtime.model_files.model_source import ModelSource
from runtime.models.eagle3_layout import read_aux_layers
from runtime.models.registry import load_hf_config
from runtime.small_file import unreadable, write_whole
from runtime.text.tokenizer import Tokenizer

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SHOWN_SIZES = (4096, 6144, 8192, 10240, 12288, 16384)
CONTEXT = 2048
"""Context length of the engines: longer than any conversation here, and small enough for a small KV cache."""
KV_TOKENS = 768
"""Tokens of KV per running request, on CUDA."""
MEASURED_TOGETHER = 256
HAND_MADE = 80
HELD_OUT = "held_out.jsonl"
EXTRA = "notes.md"
"""A hand-written file that is appended to the model card."""
FEATURE_SAMPLE = 64
ESTIMATED = 256
"""Number of held-out answers for estimates during training."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One run.

    Attributes:
        source: the target.
        output: folder of the head.
        work: folder of data and checkpoints; evaluation does not need it.
        device, dtype: device of target and training, and the dtype of GEMMs.
        quantization: quantisation of the engine that generates the data (CPU).
        aux_layers: layers of the target whose inputs are the features.
        shapes: the measured shapes.
        prompts: maximum number of held-out prompts.
        measured_tokens: maximum length of measured answers.
        engines: number of engines that generate text in parallel.
        initial_head: folder of a head to continue from, or None.
    """

    source: ModelSource
    output: Path
    work: Path
    device: Literal["cpu", "cuda"]
    dtype: Literal["float32", "bfloat16"]
    seed: int
    threads: int | None
    quantization: str | None
    amount: Amount
    course: Course
    draft_vocab_size: int
    intermediate_size: int | None
    aux_layers: tuple[int, ...]
    shapes: tuple[Shape, ...]
    prompts: int
    measured_tokens: int
    batch_limit: int
    engines: int
    initial_head: Path | None

    def engine_options(self, sizes: Sequence[int], most: int) -> dict[str, Any]:
        """Options of an `Engine` for the target with at most `most` running requests; on CUDA, `sizes` are the captured batch sizes."""
        most = min(self.batch_limit, most)
        options: dict[str, Any] = {
            "model_path": self.source.weights_folder,
            "tokenizer_path": self.source.tokenizer_folder,
            "load_format": self.source.kind,
            "device": self.device,
            "dtype": self.dtype,
            "random_seed": self.seed,
            "context_length": min(CONTEXT, load_hf_config(self.source.weights_folder).max_context_len),
            "max_running_requests": most,
        }
        if self.device == "cuda":
            options["cuda_graph_bs"] = (*(size for size in sizes if size < most), most)
            options["max_total_tokens"] = max(most * KV_TOKENS, 2 * CONTEXT)  # several engines share a device
        elif self.threads is not None:
            options["cpu_threads"] = self.threads
        return options


class Notes:
    """Notes of the phases for the model card, in `run.json` next to the head; in the work folder what it was made for."""

    def __init__(self, folder: Path, flag: str = "--output") -> None:
        """Raises `ConfigError` if the folder cannot be created, or its notes cannot be read."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"{flag} {folder} cannot be written: {unreadable(error)}") from error
        self._file = folder / "run.json"
        self.all: dict[str, Any] = read_object(self._file) if self._file.is_file() else {}

    @classmethod
    def made_for(cls, folder: Path, flag: str, **facts: object) -> Notes:
        """The notes of a folder, with these facts. Raises `ConfigError` if one of them differs from an earlier run's."""
        notes = cls(folder, flag)
        for name, value in facts.items():
            if (other := notes.all.get(name, value)) != value:
                raise ConfigError(f"{flag} {folder} was made for {name} {other}, not {value}. Name another folder.")
            notes.put(name, value)
        return notes

    def put(self, name: str, value: object) -> None:
        """Add a note."""
        self.all[name] = value
        write_whole(self._file, (json.dumps(self.all, indent=1) + "\n").encode())


def run(plan: Plan, phases: Sequence[str]) -> None:
    """Run those of generate, train and evaluate that are in `phases`, in this order.

    Raises:
        ConfigError: no server can run the head, or a folder was made for another model or other layers.
    """
    check_head(plan)
    notes = Notes.made_for(plan.output, "--output", model=plan.source.served_name)
    if {"generate", "train"} & set(phases):
        Notes.made_for(plan.work, "--work", model=plan.source.served_name, aux_layers=list(plan.aux_layers))
    steps: dict[str, Callable[[Plan, Notes], None]] = {"generate": generate, "train": train, "evaluate": evaluate}
    for name, step in steps.items():
        if name in phases:
            step(plan, notes)
    write_card(plan.output, notes)


def check_head(plan: Plan) -> None:
    """Raise `ConfigError` for layers that config.json cannot name, and for shapes that a server refuses."""
    target, layers = load_hf_config(plan.source.weights_folder), plan.aux_layers
    if read_aux_layers(aux_json(layers), target, "--aux-layers") != layers:
        raise ConfigError(f"--aux-layers {' '.join(map(str, layers))}: the first must be 2 for a target of class {target.architecture}")
    for shape in plan.shapes:
        check(from_fields({"model_path": plan.source.weights_folder, **shape.options(plan.output)}))


# ---- data


def generate(plan: Plan, notes: Notes) -> None:
    """Generate conversations until there are enough, and write the held-out prompts next to the head."""
    if plan.engines == 1:
        write_part(plan, 0)
    else:
        context = multiprocessing.get_context("spawn")
        parts = [context.Process(target=write_part, args=(plan, part)) for part in range(plan.engines)]
        for process in parts:
            process.start()
        for process in parts:
            process.join()
        if failed := sum(process.exitcode != 0 for process in parts):
            print(f"{failed} of {plan.engines} engines failed; the text of the others is used")
    conversations = load_data(plan)
    written = [ShardFolder(folder).note for folder in data_folder(plan).iterdir()]
    seconds = max(note["seconds"] for note in written)
    greedy = train_tokens([c for c in conversations if c.temperature == 0.0])
    tokens = train_tokens(conversations)
    held_out = list(dict.fromkeys(c.prompt for c in conversations if c.held_out))
    facts = {"conversations": sum(not c.held_out for c in conversations), "answer_tokens": tokens,
             "greedy_share": greedy / max(tokens, 1), "held_out": len(held_out), "seconds": seconds,
             "kinds_share": plan.amount.kinds_share}  # fmt: skip
    notes.put("data", max((note["made"] for note in written), key=len) | facts)
    lines = [json.dumps({"kind": "held-out", "prompt": prompt}, ensure_ascii=False) for prompt in held_out]
    (plan.output / HELD_OUT).write_text("\n".join([*lines, ""]), encoding="utf-8")
    print(f"data: {facts['conversations']} conversations, {tokens} answer tokens ({facts['greedy_share']:.0%} greedy), "
          f"{len(held_out)} prompts held out, {facts['seconds']:.0f} s")  # fmt: skip


def data_folder(plan: Plan) -> Path:
    """The folder of the parts, one per engine."""
    return plan.work / "data"


def write_part(plan: Plan, part: int) -> None:
    """Generate one engine's part of the text; the first part has the held-out prompts."""
    amount = dataclasses.replace(
        plan.amount, part=part, tokens=plan.amount.tokens // plan.engines, held_out=0 if part else plan.amount.held_out
    )
    shards = ShardFolder(data_folder(plan) / f"part-{part}")
    if not enough(shards, amount):
        options = plan.engine_options((64, 128, 192, 256, 320, 384, 448, 512, 640, 768), plan.batch_limit)
        with Engine(**options, **({"quantization": plan.quantization} if plan.quantization else {})) as engine:
            synthesize(engine, Tokenizer.load(plan.source.tokenizer_folder), amount, shards)
        shards.put_note(made=made(plan))


def load_data(plan: Plan) -> list[Conversation]:
    """All conversations, except training conversations whose prompt is held out."""
    conversations = ShardFolder(data_folder(plan)).load()
    held_out = {key_of(c.prompt) for c in conversations if c.held_out}
    return [c for c in conversations if c.held_out or key_of(c.prompt) not in held_out]


def made(plan: Plan) -> dict[str, Any]:
    """The origin of a phase's result: command, commit, machine, seed."""
    command = portable(" ".join(["python", "scripts/train_eagle.py", *sys.argv[1:]]))
    return {"command": command, "commit": commit(), "machine": describe(), "seed": plan.seed}


# ---- training


def train(plan: Plan, notes: Notes) -> None:
    """Train on the data in the work folder, or resume training, and export the head."""
    conversations = load_data(plan)
    train_set = [c for c in conversations if not c.held_out]
    held_out = [c for c in conversations if c.held_out][:ESTIMATED]
    if not train_set or not held_out:
        raise SystemExit(f"{data_folder(plan)} has no training or no held-out conversations; run the generate phase first")
    if plan.device == "cpu" and plan.threads:
        torch.set_num_threads(plan.threads)
    target = load_target(plan)
    vocabulary = choose_vocabulary(plan, notes, target, train_set, held_out)
    head = make_head(plan, target, vocabulary, train_set)
    trainer = Trainer(head, target, train_set, held_out, plan.course, plan.work / f"seed-{plan.seed}")
    if trainer.resume():
        print(f"resuming at step {trainer.progress.step}")
    elif plan.initial_head is None:
        trainer.calibrate()
    trainer.run(lambda: head.export(plan.output, target.aux_layers))
    weights = head.export(plan.output, target.aux_layers)
    p = trainer.progress
    settings = dataclasses.asdict(plan.course) | {"amp": str(plan.course.amp).removeprefix("torch.")}
    hidden = ("seed", "save_seconds", "log_steps", "checks", "steps", "seconds")
    settings = {name: value for name, value in settings.items() if name not in hidden}
    if plan.initial_head is not None:
        settings["initial_head"] = plan.initial_head.name
    notes.put("training", made(plan) | {"steps": p.step, "tokens": p.tokens, "seconds": p.seconds, "settings": settings})
    notes.put("head", head_facts(head, target.aux_layers, weights))
    figures = {"history": p.history, "checks": p.checks}
    (plan.output / "training.json").write_text(json.dumps(figures) + "\n", encoding="utf-8")
    draw_curves(plan.output / "curves.png", p.history, p.checks)
    if plan.device == "cuda":
        print(f"peak device memory: {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")
        del trainer, head, target
        torch.cuda.empty_cache()


def load_target(plan: Plan) -> FrozenTarget:
    """The frozen target, sized for the largest batch."""
    if plan.source.kind != "safetensors":
        raise SystemExit("training requires real weights; dummy weights cannot be used")
    config = load_hf_config(plan.source.weights_folder)
    device = torch.device(plan.device, 0) if plan.device == "cuda" else torch.device("cpu")
    room = plan.course.batch_tokens + 2 * max(plan.course.max_length, CONTEXT)
    return FrozenTarget(plan.source.weights_folder, config, plan.aux_layers, DTYPES[plan.dtype], device, room)


def choose_vocabulary(
    plan: Plan, notes: Notes, target: FrozenTarget, train_set: Sequence[Conversation], held_out: Sequence[Conversation]
) -> np.ndarray:
    """Choose the draft's vocabulary, and print the coverage of other sizes."""
    c = target.config
    counts, unseen = answer_counts(train_set, c.vocab_size), answer_counts(held_out, c.vocab_size)
    for size in (size for size in SHOWN_SIZES if size < c.vocab_size):
        ids = pick_vocabulary(counts, size, c.eos_ids)
        print(f"vocabulary of {size}: {coverage(counts, ids):.3%} of training answers, {coverage(unseen, ids):.3%} of held-out ones")
    ids = pick_vocabulary(counts, min(plan.draft_vocab_size, c.vocab_size), c.eos_ids)
    both = {"coverage": coverage(counts, ids), "held_out_coverage": coverage(unseen, ids)}
    notes.put("data", notes.all.get("data", {}) | both)
    return ids


def make_head(plan: Plan, target: FrozenTarget, vocabulary: np.ndarray, train_set: Sequence[Conversation]) -> EagleHead:
    """A new head on the target's device."""
    config = head_config(target.config, plan.intermediate_size or target.config.intermediate_size, len(vocabulary))
    head = EagleHead(config, target.embed, vocabulary, feature_size(target, train_set, plan.course)).to(target.device)
    head.init_weights(target.model.lm_head.weight, target.model.final_norm.weight, torch.Generator().manual_seed(plan.seed))
    if plan.initial_head is not None:
        head.continue_from(plan.initial_head, target.model.lm_head.weight)
    return head


def feature_size(target: FrozenTarget, conversations: Sequence[Conversation], course: Course) -> torch.Tensor:
    """The root mean square of each feature channel in answers, float32 [3 * H]."""
    rows = [[c] for c in conversations[:FEATURE_SAMPLE] if len(c.ids) <= course.max_length]
    most = max(1, course.batch_tokens // course.max_length)
    batch = make_batch(rows[:most] or [[conversations[0]]], course.max_length).to(target.device)
    features, _ = target.run(batch.ids)
    answers = features.flatten(0, 1)[(batch.depth.flatten() >= 0).to(target.device)].float()
    return answers.square().mean(0).sqrt().clamp(min=1e-3)


def head_facts(head: EagleHead, aux_layers: tuple[int, ...], weights: Path) -> dict[str, Any]:
    """The facts about the head for the model card."""
    c = head.config
    return {
        "hidden_size": c.hidden_size, "intermediate_size": c.intermediate_size, "draft_vocab_size": len(head.vocabulary),
        "vocab_size": c.vocab_size, "aux_layers": list(aux_layers), "parameters": sum(p.numel() for p in head.parameters()),
        "megabytes": weights.stat().st_size / 1e6,
    }  # fmt: skip


# ---- measuring


def evaluate(plan: Plan, notes: Notes) -> None:
    """Measure acceptance with the server; rows of other devices in evaluation.json are kept."""
    every = max(1, -(-HAND_MADE // plan.prompts))  # a quick run uses fewer prompts
    hand_made = read_prompts("hand-made", CHAT_PROMPTS).every(every)
    unseen, trained = (
        read_prompts(name, EVERYDAY, held_out).every(max(1, -(-count // plan.prompts)))
        for name, held_out, count in ((NO_TEMPLATES, True, 96), (TEMPLATES, False, 80))
    )
    sets = [unseen, trained, hand_made]
    if (plan.output / HELD_OUT).is_file():  # a head from elsewhere has no such file
        sets.insert(0, read_prompts("held-out", plan.output / HELD_OUT).first(plan.prompts))
    file = plan.output / "evaluation.json"
    others = [row for row in _rows(file) if (row["device"], row["dtype"]) != (plan.device, plan.dtype)]
    where, rows = {"machine": describe()["device"], "commit": commit()}, []
    for shape in plan.shapes:
        options = plan.engine_options((1, 2, 4, 8, 16, 32, 64, 128), MEASURED_TOGETHER)
        found = measure(options, plan.output, shape, sets, plan.measured_tokens)
        print(table(found), flush=True)
        rows += [row | where for row in found]
        write_whole(file, (json.dumps(others + rows, indent=1) + "\n").encode())


def _rows(file: Path) -> list[dict[str, Any]]:
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else []


def compare(output: Path, other: Path) -> None:
    """Add the acceptance of a head trained with another seed to the card of the head in `output`.

    Raises:
        SystemExit: one of them has not been trained and measured, or both have the same seed.
    """
    for folder in (output, other):
        missing = [name for name in ("run.json", "evaluation.json") if not (folder / name).is_file()]
        if missing:
            raise SystemExit(f"{folder} has no {' and no '.join(missing)}; train and evaluate it first")
    notes, theirs = Notes(output), Notes(other).all
    seed = theirs["training"]["seed"]
    if seed == notes.all["training"]["seed"]:
        raise SystemExit(f"both heads were trained with seed {seed}")
    facts = {name: theirs["training"][name] for name in ("seed", "commit", "seconds")}
    facts |= {"command": portable(theirs["training"]["command"]), "device": theirs["training"]["machine"]["device"]}
    kept = [one for one in notes.all.get("other_seeds", []) if one["seed"] != seed]
    rows = [{name: row[name] for name in (*SAME, "accept_length")} for row in _rows(other / "evaluation.json")]
    notes.put("other_seeds", [*kept, facts | {"rows": rows}])
    write_card(output, notes)


def write_card(output: Path, notes: Notes) -> None:
    """Write README.md next to the head, if there is a head."""
    if "head" in notes.all:
        text = model_card(notes.all, _rows(output / "evaluation.json"))
        extra = output / EXTRA
        text += "\n" + extra.read_text(encoding="utf-8") if extra.is_file() else ""
        (output / "README.md").write_text(text, encoding="utf-8")
        print(f"head: {output}, {os.path.getsize(output / 'model.safetensors') / 1e6:.1f} MB")
