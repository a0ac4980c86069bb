"""Requirements and capabilities of each drafting algorithm. No torch: flag checks, model checks and drafters read the same table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

SpecAlgorithm = Literal["EAGLE", "EAGLE3", "MTP", "DFLASH", "STANDALONE", "NGRAM"]


@dataclass(frozen=True, slots=True)
class AlgorithmCaps:
    """The requirements and capabilities of an algorithm. A flag that has no effect with it is refused at start-up.

    Attributes:
        draft: where its draft model is: in its own folder, in the target's checkpoint, or nowhere.
        without_folder: the algorithm that runs instead if no folder is given; None for an error.
        unused_flags: flags that have no effect.
        unused_why: the reason, as a sentence.
        trees: whether drafts may branch.
        no_token_map: why no token map can restrict the drafts; empty if one can.
        blocks: whether the draft fills blocks, whose size in its checkpoint is the default depth.
        unmixable: why a pass cannot have prompts and decoding requests; empty if it can.
    """

    draft: Literal["folder", "checkpoint", "none"] = "folder"
    without_folder: SpecAlgorithm | None = None
    unused_flags: tuple[str, ...] = ()
    unused_why: str = ""
    trees: bool = False
    no_token_map: str = ""
    blocks: bool = False
    unmixable: str = ""


_FOLDER = ("speculative_draft_model_path", "speculative_draft_load_format", "speculative_draft_model_quantization")
_RUNS = (
    "speculative_draft_attention_backend",
    "disable_draft_decode_cuda_graph",
    "disable_draft_extend_cuda_graph",
    "disable_draft_head_candidates",
)
ALGORITHM_CAPS: dict[SpecAlgorithm, AlgorithmCaps] = {
    "EAGLE": AlgorithmCaps(without_folder="MTP", trees=True),
    "EAGLE3": AlgorithmCaps(trees=True, no_token_map="an EAGLE3 head has its own vocabulary"),
    "MTP": AlgorithmCaps(
        draft="checkpoint",
        unused_flags=_FOLDER,
        unused_why="MTP drafts with a layer of the model's own checkpoint. Leave it out, or use EAGLE.",
        trees=True,
    ),
    "DFLASH": AlgorithmCaps(blocks=True, no_token_map="a DFLASH draft scores all tokens of its LM head, which usually is the target's"),
    "STANDALONE": AlgorithmCaps(
        unused_flags=("disable_draft_head_candidates",),
        unused_why="A standalone draft model scores all tokens with its own weights. Leave it out.",
        no_token_map="a standalone draft model scores all tokens with its own weights",
    ),
    "NGRAM": AlgorithmCaps(
        draft="none",
        unused_flags=(*_FOLDER, *_RUNS, "speculative_draft_tp_size"),
        unused_why="NGRAM copies from the text so far and has no draft model. Leave it out.",
        no_token_map="NGRAM copies from the text so far",
        unmixable="NGRAM looks up its drafts between two steps",
    ),
}
"""The algorithms, by the name that `--speculative-algorithm` takes."""


def tokens_per_step(num_steps: int, topk: int, num_draft_tokens: int) -> int:
    """KV positions beyond the committed length that one iteration may write."""
    return max(num_steps * topk, num_draft_tokens)
