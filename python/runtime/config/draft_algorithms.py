"""The table of drafting algorithms: what each one needs and can do. No torch: flag checks, model checks and drafters read it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

SpecAlgorithm = str
"""The name of an algorithm, a key of `ALGORITHM_CAPS`."""
DraftFormat = Literal["eagle", "eagle3", "dflash", "model"]
"""How a draft with its own folder is stored, for `models/draft_config.py`. "model": as any target."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmCaps:
    """The requirements and capabilities of an algorithm. A flag that has no effect with it is refused at start-up.

    Attributes:
        drafter: `module:name` of the function of a `WorkerContext` and the target that makes the `Drafter`. A string, because its
            module imports torch.
        draft: where its draft model is: in its own folder, in this format; in the target's checkpoint; or nowhere.
        without_folder: the algorithm that runs instead if no folder is given; None for an error.
        own_unused_flags: flags that have no effect, in addition to those about a folder or a draft model that it does not have.
        unused_why: why the flags have no effect, as a sentence.
        trees: whether drafts may branch.
        no_token_map: why no token map can restrict the drafts; empty if one can.
        unmixable: why a pass cannot have prompts and decoding requests; empty if it can.
    """

    drafter: str
    draft: DraftFormat | Literal["checkpoint", "none"]
    without_folder: SpecAlgorithm | None = None
    own_unused_flags: tuple[str, ...] = ()
    unused_why: str = ""
    trees: bool = False
    no_token_map: str = ""
    unmixable: str = ""

    @property
    def has_folder(self) -> bool:
        """Whether its draft model is in its own folder."""
        return self.draft not in ("checkpoint", "none")

    @property
    def unused_flags(self) -> tuple[str, ...]:
        """All flags that have no effect."""
        model = () if self.draft != "none" else _MODEL
        return (() if self.has_folder else _FOLDER) + model + self.own_unused_flags


_FOLDER = ("speculative_draft_model_path", "speculative_draft_load_format", "speculative_draft_model_quantization")
"""Flags about a draft model with its own folder."""
_MODEL = (
    "speculative_draft_attention_backend",
    "speculative_draft_tp_size",
    "disable_draft_decode_cuda_graph",
    "disable_draft_extend_cuda_graph",
    "disable_draft_head_candidates",
)
"""Flags about any draft model."""
ALGORITHM_CAPS: dict[SpecAlgorithm, AlgorithmCaps] = {
    "EAGLE": AlgorithmCaps(drafter="runtime.speculative.eagle_drafters:eagle", draft="eagle", without_folder="MTP", trees=True),
    "EAGLE3": AlgorithmCaps(
        drafter="runtime.speculative.eagle_drafters:eagle3",
        draft="eagle3",
        trees=True,
        no_token_map="an EAGLE3 head has its own vocabulary",
    ),
    "MTP": AlgorithmCaps(
        drafter="runtime.speculative.eagle_drafters:mtp",
        draft="checkpoint",
        unused_why="MTP drafts with a layer of the model's own checkpoint. Leave it out, or use EAGLE.",
        trees=True,
    ),
    "DFLASH": AlgorithmCaps(
        drafter="runtime.speculative.dflash_drafter:DFlashDrafter.make",
        draft="dflash",
    ),
    "STANDALONE": AlgorithmCaps(
        drafter="runtime.speculative.eagle_drafters:standalone",
        draft="model",
        own_unused_flags=("disable_draft_head_candidates",),
        unused_why="A standalone draft model scores tokens with its own weights. Leave it out.",
    ),
    "NGRAM": AlgorithmCaps(
        drafter="runtime.speculative.ngram_drafter:NgramDrafter.make",
        draft="none",
        unused_why="NGRAM copies from the text so far and has no draft model. Leave it out.",
        no_token_map="NGRAM copies from the text so far",
        unmixable="NGRAM looks up its drafts between two steps",
    ),
}
"""The algorithms, by the name that `--speculative-algorithm` takes."""


def tokens_per_step(num_steps: int, topk: int, num_draft_tokens: int) -> int:
    """KV positions beyond the committed length that one iteration may write."""
    return max(num_steps * topk, num_draft_tokens)
