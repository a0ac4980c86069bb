"""The drafter: proposes tokens for the target to verify, and processes the committed tokens. A new drafter is one class."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from runtime.batch import BatchResult, Int32, RowInit
from runtime.layers.gemm.gemm import Gemm
from runtime.layers.sampling_tables import SamplingNeeds
from runtime.model_executor.depth import DepthBatches
from runtime.model_executor.draft_window import NO_DRAFTS, DraftWindow, TreeShape
from runtime.model_executor.graph_runner import GraphRunner
from runtime.model_executor.input_buffers import InputBuffers
from runtime.model_executor.iteration import CommittedWindow, Iteration
from runtime.model_executor.model_runner import ModelRunner
from runtime.model_executor.target_model import ExtendPass, MakeRunner, TargetModel


@dataclass(frozen=True, slots=True)
class DrafterSpec:
    """What a drafter needs from its worker.

    Attributes:
        shape: windows at full depth.
        prefix_lookahead: 1 if draft KV at a position also depends on the next token, else 0.
        needs_history: whether every `RowInit` must carry its history.
        overlap: whether drafts can be proposed before the results of the previous step are read on the host.
        capturable: whether `propose` and `follow` only launch work, so that a graph can record them.
        aux_layers: layers of the target whose hidden states the drafter reads instead of the last hidden states.
        feature_width: width of the target's states that `follow` reads at each window position; 0 for none.
        catch_up: tokens per request of the catch-up window; 0 if the drafter has none.
        to_target, to_draft: int64 [Vd] and [V], maps between the vocabularies; None if they are the same.
    """

    shape: TreeShape
    prefix_lookahead: int = 0
    needs_history: bool = False
    overlap: bool = True
    capturable: bool = False
    aux_layers: tuple[int, ...] = ()
    feature_width: int = 0
    catch_up: int = 0
    to_target: torch.Tensor | None = None
    to_draft: torch.Tensor | None = None

    @property
    def max_width(self) -> int:
        """Tokens per request of the widest fixed-width pass."""
        return max(self.shape.num_draft_tokens, self.shape.topk)


@dataclass(frozen=True, slots=True)
class ModelPasses:
    """One model on the device and its passes, for the memory plan.

    Attributes:
        runner: its weights, KV pool and backend.
        graphs: its graph runners.
    """

    runner: ModelRunner
    graphs: list[GraphRunner]


@dataclass(frozen=True, slots=True)
class DraftSetup:
    """The parts from which a drafter makes its graph runners.

    Attributes:
        inputs: persistent inputs, shared with the target's runners.
        depths: batch sizes of each depth.
        make_runner: makes a graph runner over `inputs`.
    """

    target: TargetModel
    inputs: InputBuffers
    depths: dict[int, DepthBatches]
    make_runner: MakeRunner


class Drafter(Protocol):
    """Proposes drafts and follows the target. Subclass it explicitly: hooks do nothing by default.

    All methods except `observe` launch work on the device without waiting for it.

    Attributes:
        spec: constant requirements, known from the start.
    """

    spec: DrafterSpec

    def propose(self, iteration: Iteration) -> DraftWindow:
        """The last committed token of each request and K = `iteration.depth` drafts after it."""
        ...

    # ---- hooks

    def follow(self, iteration: Iteration, committed: CommittedWindow) -> None:
        """Advance the draft's state to the end of the committed tokens; at K = 0 a later `before_iteration` may do it."""

    def follow_prompt(self, extend: ExtendPass) -> None:
        """Advance the draft's state to the end of the prompt chunks that the target ran."""

    def attach(self, setup: DraftSetup) -> None:
        """Allocate device state and make graph runners. Called once, before memory is planned."""

    def admit(self, new_rows: Sequence[RowInit]) -> None:
        """Initialise the rows of new requests."""

    def before_iteration(self, rows: Int32, bounds: Int32, depth: int, needs: SamplingNeeds) -> int:
        """Prepare for an iteration, whose inputs are not filled yet.

        Args:
            rows: int32 [live].
            bounds: int32 [live], upper bounds of their KV lengths.
            depth: K.
            needs: the sampling stages of the requests.

        Returns:
            Upper bound of the positions at the end of a row's KV that will have no draft KV after the iteration.
        """
        return 0

    def guesses(self, rows: torch.Tensor) -> torch.Tensor | None:
        """The next token by the draft, if `before_iteration` just ran the catch-up window with guesses although no drafts follow.

        Args:
            rows: int64 [live], the rows of the iteration that is about to run.

        Returns:
            int64 [live], tokens; None in most iterations, and for drafts without guesses.
        """
        return None

    def catch_up_eagerly(self) -> Callable[[], None] | None:
        """A call that repeats eagerly what the latest `before_iteration` ran through graphs; None if it ran nothing."""
        return None

    def row_state(self, needs: SamplingNeeds) -> list[torch.Tensor]:
        """The tensors by request row, [R, ...] each, that `follow` writes in addition to KV for requests with these needs."""
        return []

    def observe(self, rows: Int32, result: BatchResult) -> None:
        """Process the results of a step of `rows`, int32 [B], on the host."""

    def reset(self) -> None:
        """Forget every request."""

    def models(self) -> list[ModelPasses]:
        """The drafter's own models, which need KV and memory for graphs."""
        return []

    def runners(self, depth: int) -> list[GraphRunner]:
        """The drafter's graph runners at one depth."""
        return []

    def gemms(self) -> Iterable[Gemm]:
        """GEMMs of the drafter's own models to autotune, in order."""
        return ()

    def warmup_runs(self) -> list[Callable[[], object]]:
        """Runs that compile the drafter's kernels."""
        return []


class NoDrafter(Drafter):
    """Plain decoding: windows of one token."""

    def __init__(self) -> None:
        self.spec = DrafterSpec(NO_DRAFTS, capturable=True)

    def propose(self, iteration: Iteration) -> DraftWindow:
        """Windows of the last token alone."""
        return iteration.no_drafts
