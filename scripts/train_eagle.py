"""Train an EAGLE-3 draft head for a model on text that the model generates.

    python scripts/train_eagle.py --model-path MODEL --output HEAD_FOLDER

The script generates conversations with `runtime.Engine` (--generate-minutes), trains (--train-minutes) and measures acceptance. It writes
config.json, model.safetensors, README.md, evaluation.json, training.json and curves.png to HEAD_FOLDER. After an interruption, the same
command continues. --quick runs all phases in minutes; its head is poor.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parents[1]
# The package, the benchmark package and the modules of this script; child processes of the engine inherit the path.
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "python"), str(ROOT)]
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "python"), *filter(None, [os.environ.get("PYTHONPATH")])])

PHASES = ("generate", "train", "evaluate")
COMPARE = "compare"
"""A separate phase, which needs the measurements of two runs."""


class _Parser(argparse.ArgumentParser):
    """Reports a mistake in one line instead of the whole usage."""

    def error(self, message: str) -> NoReturn:
        raise SystemExit(f"{message}; --help lists all options")


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    p = _Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = p.add_argument
    add("--model-path", help="target: folder, hub id or .gguf file; default: the embedded model")
    add("--output", type=Path, required=True, help="folder of the head")
    add("--work", type=Path, help="folder for data and checkpoints; default: OUTPUT-work")
    add("--phases", default=",".join(PHASES), help="phases to run: generate,train,evaluate (default: all), or compare")
    add("--other-seed", type=Path, help="for compare: folder of a head trained with another seed; its figures go to the model card")
    add("--device", choices=("cpu", "cuda"), help="default: cuda if there is a GPU")
    add("--dtype", choices=("float32", "bfloat16"), help="dtype of the target and of GEMMs; default: bfloat16 on cuda, float32 on cpu")
    add("--threads", type=int, help="CPU threads; default: all cores")
    add("--seed", type=int, default=0)
    add("--quick", action="store_true", help="a small run of all phases")
    data = p.add_argument_group("data")
    data.add_argument("--generate-minutes", type=float, default=4.0, help="start no round after this time (default %(default)s)")
    data.add_argument("--generate-tokens", type=int, default=40_000_000, help="stop after this many answer tokens (default %(default)s)")
    data.add_argument("--answer-tokens", type=int, default=512, help="maximum answer length (default %(default)s)")
    data.add_argument("--held-out", type=int, default=256, help="number of prompts excluded from training (default %(default)s)")
    data.add_argument("--quantization", choices=("int8",), help="quantisation of the target that writes the text, on a CPU")
    data.add_argument("--engines", type=int, default=1, help="engines that write text side by side (default %(default)s)")
    data.add_argument("--kinds-share", type=float, default=0.75, help="share of user turns from prompts.yaml (default %(default)s)")
    data.add_argument("--batch", type=int, help="batch size; default: 512 on cuda, 16 on cpu")
    head = p.add_argument_group("head")
    head.add_argument("--draft-vocab-size", type=int, default=8192, help="default %(default)s")
    head.add_argument("--intermediate-size", type=int, help="default: the target's")
    head.add_argument("--initial-head", type=Path, help="folder of a trained head of the same model to continue from")
    head.add_argument("--aux-layers", type=int, nargs=3, help="layers whose inputs are the features; default: 2, n/2, n-3")
    course = p.add_argument_group("training")
    course.add_argument("--train-minutes", type=float, default=4.5, help="default %(default)s")
    course.add_argument("--train-steps", type=int, help="optimiser steps instead of minutes")
    course.add_argument("--passes", type=int, default=5, help="number of unrolled draft passes (default %(default)s)")
    course.add_argument("--batch-tokens", type=int, help="default: 32768 on cuda, 2048 on cpu")
    course.add_argument("--max-length", type=int, default=1024, help="maximum row length (default %(default)s)")
    course.add_argument("--learning-rate", type=float, default=1e-3, help="default %(default)s")
    course.add_argument("--hard-share", type=float, default=0.3, help="weight of the target's argmax in the loss (default %(default)s)")
    course.add_argument("--pass-decay", type=float, default=0.9, help="weight of a pass relative to the previous one (default %(default)s)")
    course.add_argument("--joined-share", type=float, default=0.15, help="share of conversations that share rows (default %(default)s)")
    measured = p.add_argument_group("measuring")
    measured.add_argument("--shapes", default="3/1/4,5/1/6", help="measured shapes, steps/topk/draft tokens (default %(default)s)")
    measured.add_argument("--prompts", type=int, default=256, help="maximum number of held-out prompts (default %(default)s)")
    measured.add_argument("--measured-tokens", type=int, default=256, help="maximum length of measured answers (default %(default)s)")
    return p


COUNTS = (
    "threads", "generate_tokens", "answer_tokens", "held_out", "engines", "batch", "draft_vocab_size", "intermediate_size", "train_steps",
    "passes", "batch_tokens", "max_length", "prompts", "measured_tokens",
)  # fmt: skip
LIMITS: tuple[tuple[Sequence[str], str, Callable[[float], bool]], ...] = (
    (COUNTS, "at least 1", lambda value: value >= 1),
    (("kinds_share", "hard_share", "joined_share"), "between 0 and 1", lambda value: 0 <= value <= 1),
    (("generate_minutes", "train_minutes", "learning_rate", "pass_decay"), "a positive number", lambda value: 0 < value < math.inf),
)
"""By option: the requirement in words, and its check."""
QUICK = {
    "generate_minutes": 2.0, "generate_tokens": 6000, "answer_tokens": 64, "held_out": 8, "draft_vocab_size": 4096, "train_minutes": 1.0,
    "prompts": 8, "measured_tokens": 48,
}  # fmt: skip
"""Defaults of options with --quick."""


def check_numbers(args: argparse.Namespace) -> None:
    """Raise `SystemExit` for numbers with which no run can succeed."""
    for names, wanted, is_one in LIMITS:
        for name in names:
            value = getattr(args, name)
            if value is not None and not is_one(value):
                raise SystemExit(f"--{name.replace('_', '-')} is {value}; it must be {wanted}")


def main(argv: list[str] | None = None) -> None:
    """Run. Raises `SystemExit` with a sentence for a mistake in the options or the files."""
    parser = build_parser()
    args = parser.parse_args(argv)
    if args.quick:
        parser.set_defaults(**QUICK)
        args = parser.parse_args(argv)
    phases = args.phases.split(",")
    if phases != [COMPARE] and not set(phases) <= set(PHASES):
        raise SystemExit(f"--phases {args.phases}: the value must list {', '.join(PHASES)}, or be {COMPARE}")
    if (phases == [COMPARE]) != (args.other_seed is not None):
        raise SystemExit(f"--phases {COMPARE} requires --other-seed FOLDER, and --other-seed requires --phases {COMPARE}")
    if args.initial_head is not None and not os.path.isfile(args.initial_head / "model.safetensors"):
        raise SystemExit(f"--initial-head {args.initial_head}: there is no model.safetensors")
    check_numbers(args)
    if args.other_seed is not None:
        from eagle_training.pipeline import compare

        return compare(args.output, args.other_seed)

    # torch is imported late so that --help is fast.
    import torch
    from eagle_training.evaluation import Shape
    from eagle_training.pipeline import DTYPES, Plan, run
    from eagle_training.synthesis import Amount
    from eagle_training.trainer import Course

    from runtime.errors import ConfigError, ServingError, report
    from runtime.model_files.model_source import resolve_model
    from runtime.models.eagle3_layout import default_aux_layers
    from runtime.models.registry import load_hf_config

    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    on_cuda = device == "cuda"
    dtype = args.dtype or ("bfloat16" if on_cuda else "float32")
    batch = args.batch or (512 if on_cuda else 16)
    try:
        shapes = tuple(Shape.parse(text) for text in args.shapes.split(","))
    except ValueError:
        raise SystemExit(f"--shapes {args.shapes}: it must list steps/topk/draft tokens, such as 3/1/4,5/1/6") from None
    try:
        source = resolve_model(args.model_path)
        run(
            Plan(
                source=source,
                output=args.output,
                work=args.work or args.output.with_name(args.output.name + "-work"),
                device=device,
                dtype=dtype,
                seed=args.seed,
                threads=args.threads,
                quantization=args.quantization,
                amount=Amount(
                    seed=args.seed,
                    seconds=args.generate_minutes * 60,
                    tokens=args.generate_tokens,
                    held_out=args.held_out,
                    answer_tokens=args.answer_tokens,
                    kinds_share=args.kinds_share,
                    round_size=256 if on_cuda else 24,
                    workers=3 if on_cuda else 1,
                ),
                course=Course(
                    seed=args.seed,
                    steps=args.train_steps,
                    seconds=args.train_minutes * 60,
                    passes=args.passes,
                    learning_rate=args.learning_rate,
                    batch_tokens=args.batch_tokens or (32768 if on_cuda else 2048),
                    max_length=args.max_length,
                    joined_share=args.joined_share,
                    pass_decay=args.pass_decay,
                    hard_share=args.hard_share,
                    amp=DTYPES[dtype],
                ),
                draft_vocab_size=args.draft_vocab_size,
                intermediate_size=args.intermediate_size,
                aux_layers=tuple(args.aux_layers or default_aux_layers(load_hf_config(source.weights_folder).num_layers)),
                shapes=shapes,
                prompts=args.prompts,
                measured_tokens=args.measured_tokens,
                batch_limit=batch,
                engines=args.engines,
                initial_head=args.initial_head,
            ),
            phases,
        )
    except ConfigError as error:
        raise SystemExit(str(error)) from error
    except ServingError as error:
        raise SystemExit(report(error)) from error


def command(argv: list[str] | None = None) -> int:
    """Run as a program. Exit status: 0, 1 after a failure, 2 for a mistake in the options or the files, 130 on Ctrl-C."""
    try:
        main(argv)
    except SystemExit as error:
        if not isinstance(error.code, str):
            raise
        print(f"train_eagle: {error.code}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("train_eagle: interrupted; the same command continues", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(command())
