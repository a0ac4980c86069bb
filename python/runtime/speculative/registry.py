"""Which drafter an algorithm has."""

from __future__ import annotations

from collections.abc import Callable

from runtime.config.draft_algorithms import SpecAlgorithm
from runtime.model_executor.context import WorkerContext
from runtime.model_executor.drafter import Drafter, NoDrafter
from runtime.models.decoder import DecoderModel
from runtime.models.draft_head import DraftModel
from runtime.speculative.dflash_drafter import DFlashDrafter
from runtime.speculative.draft_models import draft_runner, load_dflash, load_eagle, load_eagle3, load_mtp, load_standalone
from runtime.speculative.eagle_worker import EagleWorker
from runtime.speculative.ngram_drafter import NgramDrafter

MakeDrafter = Callable[[WorkerContext, DecoderModel], Drafter]


def make_drafter(context: WorkerContext, target: DecoderModel) -> Drafter:
    """The configured drafter, loaded for its target. Raises `ConfigError` if they do not fit."""
    config = context.config.speculative
    return NoDrafter() if config is None else DRAFTERS[config.algorithm](context, target)


def _eagle(load: Callable[[WorkerContext, DecoderModel], DraftModel]) -> MakeDrafter:
    """Makes an `EagleWorker` of a loaded draft model."""

    def make(context: WorkerContext, target: DecoderModel) -> Drafter:
        model = load(context, target)
        return EagleWorker(model, draft_runner(context, model), context.speculative)

    return make


def _dflash(context: WorkerContext, target: DecoderModel) -> Drafter:
    model = load_dflash(context, target)
    return DFlashDrafter(model, draft_runner(context, model), context.speculative)


DRAFTERS: dict[SpecAlgorithm, MakeDrafter] = {
    "EAGLE": _eagle(load_eagle),
    "EAGLE3": _eagle(load_eagle3),
    "MTP": _eagle(load_mtp),
    "DFLASH": _dflash,
    "STANDALONE": _eagle(load_standalone),
    "NGRAM": lambda context, target: NgramDrafter(context.speculative.num_steps),
}
"""Makes the drafter of each algorithm in `config/draft_algorithms.py`."""
