"""The bytes that the steps of a served shape must read, and the lower bound of the time that this takes."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Experts:
    """The sparse layers of a model.

    Attributes:
        count, top_k: experts per layer, and experts per token.
        bytes: bytes of one expert.
        layers: number of sparse layers.
        counted: distinct experts per layer that the passes were counted to read; None if they were not counted.
    """

    count: int
    top_k: int
    bytes: float
    layers: int
    counted: float | None = None

    def distinct(self, tokens: float) -> float:
        """Distinct experts per layer: as counted, else as expected for `tokens` with uniform and independent routing, an upper bound."""
        if self.counted is not None:
            return self.counted
        return self.count * (1 - (1 - self.top_k / self.count) ** tokens)


@dataclass(frozen=True, slots=True)
class StepBytes:
    """The bytes that one pass reads.

    Attributes:
        fixed: bytes of the weights that every pass reads: attention, dense MLPs, shared experts, routers, LM head (in 16 bits, although
            greedy drafts mostly read its 8-bit copy).
        experts: the sparse layers; None for a dense model.
        full_kv, window_kv: bytes of KV per token in the layers with full attention, and in those with a sliding window.
        window: size of the sliding window in tokens.
        first: additional bytes of the first draft pass of an iteration, which are not sharded over ranks.
        whole: the part of `fixed` that is not sharded over ranks.
        shared_kv: whether each rank reads all KV, as with latent attention.
        states: bytes of one request's recurrent states, read and written.
    """

    fixed: float
    experts: Experts | None
    full_kv: float
    window_kv: float = 0.0
    window: int = 0

    first: float = 0.0
    whole: float = 0.0
    shared_kv: bool = False
    states: float = 0.0

    def of_ranks(self, size: int) -> StepBytes:
        """The bytes that `size` ranks read in total."""
        kv = self.full_kv * (size if self.shared_kv else 1)
        return replace(self, fixed=self.fixed + (size - 1) * self.whole, full_kv=kv, first=self.first * size)

    def read(self, requests: float, tokens: float, context: float) -> float:
        """Bytes of a pass over `tokens` of `requests` at a mean `context`."""
        sparse = self.experts.layers * self.experts.distinct(tokens) * self.experts.bytes if self.experts else 0.0
        kv = requests * (context * self.full_kv + min(context, self.window) * self.window_kv)
        return self.fixed + sparse + kv + requests * self.states


@dataclass(frozen=True, slots=True)
class ModelRoof:
    """The roof of a target with a draft. `one_pass`: one pass of the draft proposes a whole block."""

    target: StepBytes
    draft: StepBytes
    one_pass: bool = False

    def of_ranks(self, size: int) -> ModelRoof:
        """The roof of `size` ranks in total."""
        return replace(self, target=self.target.of_ranks(size), draft=self.draft.of_ranks(size))

    def with_counted(self, distinct_experts: float | None) -> ModelRoof:
        """The roof of passes of a sparse target that were counted to read so many experts per layer."""
        experts = self.target.experts and replace(self.target.experts, counted=distinct_experts)
        return replace(self, target=replace(self.target, experts=experts))

    def bytes(self, steps: int, batch: float, context: float) -> float:
        """Bytes of one iteration: a verify pass over `steps` + 1 tokens of each request, and `steps` draft passes, of which the first runs
        over the verified tokens.
        """
        window = batch * (steps + 1)
        total = self.target.read(batch, window, context)
        for i in range(min(steps, 1) if self.one_pass else steps):
            total += self.draft.read(batch, batch if i else window, context) + (0.0 if i else self.draft.first)
        return total

    def roof_ms(self, steps: int, batch: int, context: float, bytes_per_second: float) -> float:
        """Milliseconds of an iteration of `steps` drafts, or of a plain step, by its bytes alone."""
        return self.bytes(steps, batch, context) / bytes_per_second * 1000
