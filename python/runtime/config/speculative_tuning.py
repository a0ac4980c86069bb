"""A speculative tuning: the file that `python -m runtime.tune` writes and `--speculative-tuning` reads."""

from __future__ import annotations

import logging
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from runtime.config.attention_caps import MAX_TREE_BITS
from runtime.errors import ConfigError, ServingError
from runtime.small_file import read_small, unreadable, write_whole

log = logging.getLogger(__name__)
FLAG = "--speculative-tuning"
Count = Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]
Depth = Annotated[int, msgspec.Meta(ge=0, le=MAX_TREE_BITS - 1)]
Share = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]


class MadeFor(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The setup on which a tuning was measured.

    Attributes:
        model, draft: their names.
        model_files, draft_files: hashes of their configurations and of the names and sizes of their weights; draft: "" without one.
        weights: type of the linear weights.
        device: the GPU's name, or the CPU's and the number of threads.
        ranks: processes that share the model.
    """

    model: str
    model_files: str
    algorithm: str
    draft: str
    draft_files: str
    weights: str
    device: str
    ranks: int


class Measurement(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a tuning was measured: version of Talon, UTC time, prompts, sampling temperature, and seconds after loading."""

    version: str
    at: str
    prompts: str
    temperature: float
    seconds: float


class StepTime(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Measured seconds of an iteration of `size` requests, including padding, at one depth."""

    size: Count
    depth: Depth
    seconds: Annotated[float, msgspec.Meta(gt=0.0)]


class BatchDepth(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One line of a depth table: the best depth from this batch size up to the next line's."""

    requests: Count
    depth: Depth


class SpeculativeTuning(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The shape of the drafts, and the best depth by batch size.

    Attributes:
        format: format of the file.
        num_steps, topk, num_draft_tokens: the deepest window.
        depths: the depths of a chain from which each iteration chooses; empty for a tree.
        table: the best depth by batch size, smallest first.
        acceptance: conditional acceptance of each draft of a chain; empty for a tree.
        steps: times of a chain's iterations; empty for a tree, and on a device other than the measured one.
    """

    format: Literal["talon-speculative-tuning-1"] = "talon-speculative-tuning-1"
    made_for: MadeFor
    measurement: Measurement
    num_steps: Annotated[int, msgspec.Meta(ge=1, le=MAX_TREE_BITS - 1)]
    topk: Annotated[int, msgspec.Meta(ge=1, le=MAX_TREE_BITS)]
    num_draft_tokens: Annotated[int, msgspec.Meta(ge=2, le=MAX_TREE_BITS)]
    depths: tuple[Depth, ...]
    table: Annotated[tuple[BatchDepth, ...], msgspec.Meta(min_length=1)]
    acceptance: tuple[Share, ...]
    steps: tuple[StepTime, ...]

    def __post_init__(self) -> None:
        chosen = {line.depth for line in self.table}
        batches = [line.requests for line in self.table]
        if batches != sorted(set(batches)) or batches[0] != 1:
            raise ValueError("table must begin with one request, and requests must increase")
        if self.topk > 1:
            sound = not self.depths and not self.acceptance and not self.steps and chosen <= {0, self.num_steps}
        else:
            deepest = max(self.depths, default=0)
            sound = {0, *chosen} <= set(self.depths) and self.num_steps == deepest == self.num_draft_tokens - 1 <= len(self.acceptance)
            sound = sound and {step.depth for step in self.steps} <= set(self.depths)
        if not sound:
            raise ValueError("num_steps, topk, num_draft_tokens, depths, table, acceptance and steps do not belong together")

    @property
    def max_batch_with_drafts(self) -> int | None:
        """The largest batch with drafts; None if the table does not end with depth 0."""
        last = self.table[-1]
        return last.requests - 1 if last.depth == 0 else None

    def lines(self) -> str:
        """The table in words."""
        bounds = pairwise(line.requests for line in self.table)
        spans = [f"{first}-{end - 1}" if end > first + 1 else f"{first}" for first, end in bounds] + [f"{self.table[-1].requests} and more"]
        return ", ".join(f"{span} requests K={line.depth}" for span, line in zip(spans, self.table, strict=True))


def read_tuning(path: str) -> SpeculativeTuning:
    """The tuning in a file. Raises `ConfigError` if the file is missing or invalid."""
    try:
        return msgspec.json.decode(read_small(Path(path)), type=SpeculativeTuning)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{FLAG} {path} cannot be read: {unreadable(error)}.") from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"{FLAG} {path} is not a file of this version of python -m runtime.tune: {error}.") from error


def write_tuning(tuning: SpeculativeTuning, path: Path) -> None:
    """Write the file. Raises `ServingError` if it cannot be written; the error has its content, which took a minute to measure."""
    content = msgspec.json.format(msgspec.json.encode(tuning), indent=1) + b"\n"
    try:
        write_whole(path, content)
    except OSError as error:
        why = f"{path} cannot be written: {unreadable(error)}"
        raise ServingError(f"{why}. Save these lines in a file instead:\n{content.decode()}") from error


def fitting(tuning: SpeculativeTuning, here: MadeFor) -> SpeculativeTuning:
    """The part of the tuning that applies to `here`: on another device or with other weights, it has no times, and a warning is logged.

    Raises:
        ConfigError: the tuning is for another model, draft or algorithm.
    """
    made = tuning.made_for
    for what, compared in (("model", "model_files"), ("draft", "draft_files"), ("algorithm", "algorithm")):
        if getattr(made, compared) != getattr(here, compared):
            there, own = getattr(made, what) or "none", getattr(here, what) or "none"
            raise ConfigError(
                f"{FLAG}: the file was made for the {what} {there}; this server has {own}, or other files of that name. "
                "Run python -m runtime.tune with the flags of this server."
            )
    other = [name for name in ("device", "weights", "ranks") if getattr(made, name) != getattr(here, name)]
    if not other:
        return tuning
    log.warning(
        "speculative tuning: it was measured with %s; here is %s. Its depths may not be the best, and its times are not used.",
        *(", ".join(f"{getattr(facts, name)} ({name})" for name in other) for facts in (made, here)),
    )
    return msgspec.structs.replace(tuning, steps=())
