"""The speculative part of the configuration: how drafts are made, and the embedded model's own draft."""

from __future__ import annotations

import logging
import os
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import NoReturn

from runtime.config.attention import resolve_attention
from runtime.config.attention_caps import ATTENTION_CAPS, MAX_TREE_BITS, AttentionName
from runtime.config.draft_algorithms import ALGORITHM_CAPS, SpecAlgorithm
from runtime.config.machine import MachineFacts
from runtime.config.model_facts import DraftFacts, ModelFacts
from runtime.config.quant_config import Quantization
from runtime.config.refusals import flag_of
from runtime.config.runtime_config import DeviceConfig, DeviceKind, SpeculativeConfig
from runtime.config.server_args import SPECULATION, ServerArgs
from runtime.config.speculative_tuning import SpeculativeTuning
from runtime.config.synthetic_acceptance import synthetic_acceptance
from runtime.errors import ConfigError

log = logging.getLogger(__name__)

EMBEDDED_DRAFT = Path(__file__).parents[1] / "assets" / "smollm2-eagle3"
"""The folder of the embedded model's own draft head."""
EMBEDDED_ALGORITHM: SpecAlgorithm = "EAGLE3"
EMBEDDED_DRAFT_MAX_BATCH: dict[tuple[DeviceKind, str], int] = {("cpu", "int4"): 2, ("cpu", "int8"): 2, ("cpu", "float32"): 8}
"""Largest batch size at which drafts of the embedded model are not slower, by device and type of weights. With others drafts are faster at
every batch size we measured.
Measured with and without drafts on real text (`benchmark/results/cpu-2/embedded_speculation.json`): in int4, drafts gave 1.30 times the
tokens at batch size 1, 1.07 times at 2 and 0.74 times at 4; in int8, 1.35 times at 1 and 0.82 times at 4; in float32, 1.26 times at 8, the
largest measured.
"""
DEFAULT_STEPS = 3
"""Default depth of trees, of chains with synthetic acceptance by position, and of the embedded model's draft, a chain. The last was
measured on a CPU in int8 for one request against depths 1, 2 and 5, and on an H200 for 1, 4, 16 and 64 requests against 4.
"""
AUTO_DEPTHS = (0, 1, 2, 3, 5, 7)
"""Depths of `--speculative-num-steps auto`, the default for chains."""


@dataclass(frozen=True)
class _DraftShape:
    num_steps: int
    topk: int
    num_draft_tokens: int
    depths: tuple[int, ...] = ()


def check_speculative(args: ServerArgs) -> None:
    """Raise `ConfigError` for a batch size that turns drafting off."""
    if args.speculative_disable_by_batch_size == 0:
        raise ConfigError("--speculative-disable-by-batch-size 0 leaves no step with drafts. Use --speculative-algorithm none.")


def check_draft(args: ServerArgs) -> None:
    """Raise `ConfigError` for drafting flags without an algorithm, and for flags that have no effect with the algorithm."""
    if args.speculative_algorithm in (None, "none"):
        _refuse(args, "has no effect without --speculative-algorithm. Add that flag, or leave this one out.", *_draft_flags())
    else:
        _check_draft_source(args, args.speculative_algorithm)
        _check_draft_ranks(args)


def with_embedded_draft(args: ServerArgs, embedded: bool) -> ServerArgs:
    """Add the embedded model's own head, if that model is served and no flag selects another draft or none."""
    if not embedded or not asks_for_embedded_draft(args):
        return args
    return replace(args, speculative_algorithm=EMBEDDED_ALGORITHM, speculative_draft_model_path=str(EMBEDDED_DRAFT))


def with_block_size(args: ServerArgs, block_size: int) -> ServerArgs:
    """Set the depth to whole blocks of `block_size` tokens, unless another depth is given."""
    if args.speculative_tuning is not None or args.speculative_num_steps is not None or args.speculative_num_draft_tokens is not None:
        return args
    return replace(args, speculative_num_draft_tokens=min(block_size, MAX_TREE_BITS))


def check_depth(block_size: int, num_steps: int) -> None:
    """Raise `ConfigError` if a block has fewer masked tokens than `num_steps`."""
    if num_steps >= block_size:
        raise ConfigError(
            f"--speculative-num-steps is {num_steps}; this draft fills blocks of {block_size} tokens and drafts {block_size - 1} of them. "
            "Lower it or leave it out."
        )


def asks_for_embedded_draft(args: ServerArgs) -> bool:
    """Whether the embedded model, if served, drafts with its own head."""
    return args.speculative_algorithm in (None, EMBEDDED_ALGORITHM) and args.speculative_draft_model_path is None


def resolve_speculative(
    args: ServerArgs,
    device: DeviceConfig,
    quantization: Quantization | None,
    graphs: bool,
    machine: MachineFacts,
    model: ModelFacts,
    draft: DraftFacts | None,
    tuning: SpeculativeTuning | None,
) -> SpeculativeConfig | None:
    """Choose the shape of the drafts, the draft's kernels and graphs; None without an algorithm.

    Args:
        graphs: whether the target has graphs.
        draft: the draft model, if there is one.
        tuning: the contents of --speculative-tuning.
    """
    if args.speculative_algorithm in (None, "none"):
        return None
    algorithm = _algorithm(args, model)
    path, draft_format, block_size = (None, model.load_format, None) if draft is None else (draft.path, draft.load_format, draft.block_size)
    args = args if block_size is None else with_block_size(args, block_size)
    tuning = _applied(args, tuning)
    shape = _draft_shape(args) if tuning is None else _tuned_shape(args, tuning)
    if shape.topk > 1 and model.recurrent:
        raise ConfigError(
            "--speculative-eagle-topk must be 1: the model has recurrent states, through which a tree's branches cannot run side by side."
        )
    synthetic = _synthetic(args, shape)
    shape = shape if block_size is None else _within_block(shape, block_size, tuned=tuning is not None)
    if shape.depths:
        log.info("speculative decoding %s: each iteration runs at the best of the depths %s", algorithm, shape.depths)
    max_batch = args.speculative_disable_by_batch_size
    if tuning is not None and not shape.depths:
        max_batch = max_batch or tuning.max_batch_with_drafts
    elif path == str(EMBEDDED_DRAFT) and not shape.depths:
        max_batch = _embedded_max_batch(args, shape, device, quantization)
    attention = _draft_attention(args, device, machine)
    graphs = graphs and _can_capture(algorithm, attention)
    return SpeculativeConfig(
        algorithm=algorithm,
        draft_model_path=path,
        draft_load_format=draft_format,
        **asdict(shape),
        token_map=args.speculative_token_map,
        attention_backend=attention,
        draft_decode_graph=graphs and not args.disable_draft_decode_cuda_graph,
        draft_extend_graph=graphs and not args.disable_draft_extend_cuda_graph,
        disable_by_batch_size=max_batch,
        accept_threshold_single=_threshold(args, "speculative_accept_threshold_single"),
        accept_threshold_acc=_threshold(args, "speculative_accept_threshold_acc"),
        synthetic_accept=synthetic and synthetic[: shape.num_steps],
        check_parity=args.speculative_check_parity,
        draft_quantization="fp8" if args.speculative_draft_model_quantization == "fp8" else None,
        draft_tp_size=args.speculative_draft_tp_size,
        draft_candidates=_draft_candidates(args, device.device, shape.topk),
        tuning=tuning,
    )


def _draft_candidates(args: ServerArgs, device: DeviceKind, topk: int) -> bool:
    """Whether an 8-bit copy of the draft's LM head may select tokens: of greedy chains on a GPU."""
    unused = "a CPU scores all tokens" if device == "cpu" else "draft trees score all tokens" if topk > 1 else ""
    if unused and args.disable_draft_head_candidates:  # command lines are shared with GPUs, and runtime.tune also tries trees
        log.warning("--disable-draft-head-candidates: no effect because %s", unused)
    return not unused and not args.disable_draft_head_candidates


def _within_block(shape: _DraftShape, block_size: int, tuned: bool) -> _DraftShape:
    """The shape, without depths that exceed a block if the controller chooses depths.

    Raises:
        ConfigError: a fixed depth, or one of a tuning, exceeds a block.
    """
    whole = block_size - 1
    if not shape.depths or tuned or shape.num_steps <= whole:
        check_depth(block_size, shape.num_steps)
        return shape
    depths = tuple(sorted({min(depth, whole) for depth in shape.depths}))
    return _DraftShape(whole, 1, block_size, depths)


def _can_capture(algorithm: SpecAlgorithm, attention: AttentionName) -> bool:
    """Whether the draft's passes can be captured; true if it has none."""
    if ATTENTION_CAPS[attention].cuda_graph or ALGORITHM_CAPS[algorithm].draft == "none":
        return True
    log.warning("the draft runs eagerly, which is slower: %s attention cannot be captured", attention)
    return False


def _algorithm(args: ServerArgs, model: ModelFacts) -> SpecAlgorithm:
    """The requested algorithm, or the one that replaces it without a draft model, as in SGLang."""
    algorithm = args.speculative_algorithm
    assert algorithm is not None, "only with drafts"
    if args.speculative_draft_model_path is None:
        algorithm = ALGORITHM_CAPS[algorithm].without_folder or algorithm
    if ALGORITHM_CAPS[algorithm].draft == "checkpoint" and not model.has_mtp:
        _refuse_without_layer(args, algorithm)
    return algorithm


def _refuse_without_layer(args: ServerArgs, algorithm: SpecAlgorithm) -> NoReturn:
    """Raise `ConfigError` for a checkpoint without a draft of its own. Only an algorithm that `algorithm` replaced takes a draft model."""
    if args.speculative_algorithm != algorithm:
        raise ConfigError(
            f"--speculative-algorithm {args.speculative_algorithm} without a draft model needs a layer for multi-token prediction, and "
            "this checkpoint holds none that is supported. Name a draft model with --speculative-draft-model-path."
        )
    others = " or ".join(name for name, caps in ALGORITHM_CAPS.items() if caps.has_folder)
    raise ConfigError(
        f"--speculative-algorithm {algorithm} needs a layer for multi-token prediction, and this checkpoint holds none that is supported. "
        f"Use --speculative-algorithm NGRAM, or {others} with a draft model."
    )


def _draft_flags() -> list[str]:
    own = [field.name for field in fields(ServerArgs) if field.metadata["group"] == SPECULATION]
    return [name for name in own if name != "speculative_algorithm"]


def _refuse(args: ServerArgs, why: str, *names: str) -> None:
    for field in fields(args):
        if field.name in names and getattr(args, field.name) != field.default:
            raise ConfigError(f"{flag_of(field.name)} {why}")


def _check_draft_source(args: ServerArgs, algorithm: SpecAlgorithm) -> None:
    caps, token_map = ALGORITHM_CAPS[algorithm], args.speculative_token_map
    _refuse(args, f"has no effect: {caps.unused_why}", *caps.unused_flags)
    replaced = caps.without_folder is not None and args.model_path is not None
    if caps.has_folder and args.speculative_draft_model_path is None and not replaced:
        raise ConfigError(f"--speculative-algorithm {algorithm} needs a draft model. Name it with --speculative-draft-model-path.")
    if token_map is not None and caps.no_token_map:
        takers = ", ".join(name for name, own in ALGORITHM_CAPS.items() if not own.no_token_map)
        raise ConfigError(f"--speculative-token-map works with {takers} only; {caps.no_token_map}. Leave it out.")
    if token_map is not None and not os.path.isfile(token_map):
        raise ConfigError(
            f"--speculative-token-map {token_map} must be a file on this machine in which torch.save wrote a list or a tensor of "
            "token ids. Download a file of the hub first."
        )


def _check_draft_ranks(args: ServerArgs) -> None:
    if args.speculative_draft_tp_size is None:
        return
    if (sharing := args.tp_size // args.dp_size) == 1:
        raise ConfigError("--speculative-draft-tp-size has no effect where one rank holds the target's blocks. Leave it out.")
    if args.speculative_draft_tp_size not in (1, sharing):
        raise ConfigError(
            f"--speculative-draft-tp-size must be 1 or {sharing}, the ranks that share the target's blocks; "
            f"got {args.speculative_draft_tp_size}."
        )


def _draft_shape(args: ServerArgs) -> _DraftShape:
    topk = args.speculative_eagle_topk or 1
    asked = args.speculative_num_draft_tokens
    if args.speculative_num_steps == "auto" or _is_auto_by_default(args, topk):
        return _auto_shape(args, topk)
    steps = args.speculative_num_steps or _default_steps(args, topk)
    if topk > 1:
        return _tree_shape(args, steps, topk)
    if asked is not None and asked != steps + 1:
        log.warning("speculative num draft tokens %d, not %d: a chain of %d steps verifies one more token", steps + 1, asked, steps)
    return _DraftShape(steps, 1, steps + 1)


def _applied(args: ServerArgs, tuning: SpeculativeTuning | None) -> SpeculativeTuning | None:
    """The tuning, unless flags ask for another shape."""
    if tuning is None:
        return None
    if args.enable_dp_attention:
        raise ConfigError("--speculative-tuning has no effect with --enable-dp-attention: runtime.tune measures one group. Leave it out.")
    asked = {"speculative_num_steps": None, "speculative_num_draft_tokens": None, "speculative_eagle_topk": tuning.topk}
    for name, same in asked.items():
        if (value := getattr(args, name)) not in (None, same):
            log.warning("speculative tuning: %s %s overrides the file's depths", flag_of(name), value)
            return None
    shape = (tuning.num_steps, tuning.topk, tuning.num_draft_tokens)
    log.info("speculative tuning of %s on %s: %d/%d/%d (steps, topk, draft tokens)", tuning.measurement.at, tuning.made_for.device, *shape)
    log.info("speculative tuning, best depths: %s", tuning.lines())
    return tuning


def _tuned_shape(args: ServerArgs, tuning: SpeculativeTuning) -> _DraftShape:
    if tuning.topk > 1:
        return _tree_shape(replace(args, speculative_num_draft_tokens=tuning.num_draft_tokens), tuning.num_steps, tuning.topk)
    return _DraftShape(tuning.num_steps, 1, tuning.num_draft_tokens, tuning.depths)


def _is_auto_by_default(args: ServerArgs, topk: int) -> bool:
    """Whether no flag fixes the depth. The embedded model has a fixed default, which was measured."""
    fixed = (args.speculative_num_steps, args.speculative_num_draft_tokens)
    by_position = "," in (args.speculative_synthetic_accept_length or "")
    return topk == 1 and fixed == (None, None) and not by_position and args.speculative_draft_model_path != str(EMBEDDED_DRAFT)


def _auto_shape(args: ServerArgs, topk: int) -> _DraftShape:
    if topk > 1:
        raise ConfigError(
            "--speculative-num-steps auto needs chains: a tree has one depth. Use --speculative-eagle-topk 1, or give a number."
        )
    if args.speculative_num_draft_tokens is not None:
        raise ConfigError("--speculative-num-draft-tokens has no effect with --speculative-num-steps auto. Leave one of the two out.")
    return _DraftShape(max(AUTO_DEPTHS), 1, max(AUTO_DEPTHS) + 1, AUTO_DEPTHS)


def _tree_shape(args: ServerArgs, steps: int, topk: int) -> _DraftShape:
    algorithm = args.speculative_algorithm
    assert algorithm is not None, "only with drafts"
    if not ALGORITHM_CAPS[algorithm].trees:
        raise ConfigError(f"--speculative-eagle-topk must be 1: {algorithm} drafts chains. Trees need an EAGLE head.")
    if (steps - 1) * topk > MAX_TREE_BITS:
        raise ConfigError(
            f"--speculative-num-steps {steps} with --speculative-eagle-topk {topk} is too large: (steps - 1) * topk must be at most "
            f"{MAX_TREE_BITS}. Lower one of them."
        )
    nodes, asked = 1 + topk + (steps - 1) * topk * topk, args.speculative_num_draft_tokens
    if asked is None:
        asked = min(nodes, MAX_TREE_BITS, 2 * steps * topk)
        log.info("speculative num draft tokens %d: for %d steps with %d branches", asked, steps, topk)
    if asked > nodes:
        raise ConfigError(
            f"--speculative-num-draft-tokens must be at most {nodes} nodes for {steps} steps with {topk} branches; got {asked}."
        )
    return _DraftShape(steps, topk, asked)


def _default_steps(args: ServerArgs, topk: int) -> int:
    """The depth if it is not given; the width of a chain determines it."""
    asked = args.speculative_num_draft_tokens
    if topk == 1 and asked is not None:
        log.info("speculative num steps %d: a chain of %d draft tokens has one step fewer", asked - 1, asked)
        return asked - 1
    return DEFAULT_STEPS


def _embedded_max_batch(args: ServerArgs, shape: _DraftShape, device: DeviceConfig, quantization: Quantization | None) -> int | None:
    """The largest batch with drafts of the embedded model's own head; None for no limit."""
    measured = EMBEDDED_DRAFT_MAX_BATCH.get((device.device, quantization or device.dtype))
    max_batch = args.speculative_disable_by_batch_size or measured
    log.info(
        "speculative decoding %s %d/%d/%d (steps, topk, draft tokens) with the embedded model's own head, %s; the default is a chain of %d "
        "drafts; --speculative-disable-by-batch-size sets the limit, --speculative-algorithm none turns drafting off",
        *(EMBEDDED_ALGORITHM, shape.num_steps, shape.topk, shape.num_draft_tokens),
        "at every batch size" if max_batch is None else f"up to a batch size of {max_batch}",
        DEFAULT_STEPS,
    )
    return max_batch


def _draft_attention(args: ServerArgs, device: DeviceConfig, machine: MachineFacts) -> AttentionName:
    asked = args.speculative_draft_attention_backend
    if asked is None or asked == device.attention_backend:
        return device.attention_backend
    # The backend checks the draft's head dimension when it is built.
    flag = "--speculative-draft-attention-backend"
    return resolve_attention(asked, flag, device.device, device.dtype, machine, model=None)


def _threshold(args: ServerArgs, name: str) -> float:
    value = getattr(args, name)
    if value is not None and value < 1.0:
        log.warning("%s %g: the output no longer follows the target's distribution", flag_of(name), value)
    return 1.0 if value is None else value


def _synthetic(args: ServerArgs, shape: _DraftShape) -> tuple[float, ...] | None:
    if args.speculative_synthetic_accept_length is None:
        return None
    if shape.topk != 1:
        raise ConfigError("--speculative-synthetic-accept-length needs a chain. Use --speculative-eagle-topk 1.")
    for name in ("speculative_accept_threshold_single", "speculative_accept_threshold_acc"):
        if (getattr(args, name) or 1.0) < 1.0:
            raise ConfigError(
                f"{flag_of(name)} has no effect: --speculative-synthetic-accept-length alone decides what is accepted. "
                f"Leave {flag_of(name)} out."
            )
    by_position = synthetic_acceptance(args.speculative_synthetic_accept_length, shape.num_steps, DEFAULT_STEPS if shape.depths else None)
    log.warning("synthetic acceptance: the output is not the model's; for benchmarks only")
    return by_position
