"""The drafter of each algorithm."""

from __future__ import annotations

from collections.abc import Callable

from runtime.config.draft_algorithms import SpecAlgorithm
from runtime.config.runtime_config import SpeculativeConfig
from runtime.model_executor.build import MakeDrafter
from runtime.model_executor.context import WorkerContext
from runtime.model_executor.drafter import Drafter, NoDrafter
from runtime.model_executor.model_runner import ModelRunner
from runtime.models.decoder import DecoderModel
from runtime.speculative.dflash_drafter import DFlashDrafter
from runtime.speculative.draft_models import Draft, draft_runner, load_dflash, load_eagle, load_eagle3, load_mtp, load_standalone
from runtime.speculative.eagle_worker import EagleWorker
from runtime.speculative.ngram_drafter import NgramDrafter


def make_drafter(context: WorkerContext, target: DecoderModel) -> Drafter:
    """The configured drafter, loaded for its target. Raises `ConfigError` if they do not fit."""
    config = context.config.speculative
    return NoDrafter() if config is None else DRAFTERS[config.algorithm](context, target)


def _with_model(
    load: Callable[[WorkerContext, DecoderModel], Draft], drafter: Callable[[Draft, ModelRunner, SpeculativeConfig], Drafter]
) -> MakeDrafter:
    """A function that makes the drafter of the draft model that `load` loads."""

    def make(context: WorkerContext, target: DecoderModel) -> Drafter:
        model = load(context, target)
        return drafter(model, draft_runner(context, model), context.speculative)

    return make


DRAFTERS: dict[SpecAlgorithm, MakeDrafter] = {
    "EAGLE": _with_model(load_eagle, EagleWorker),
    "EAGLE3": _with_model(load_eagle3, EagleWorker),
    "MTP": _with_model(load_mtp, EagleWorker),
    "DFLASH": _with_model(load_dflash, DFlashDrafter),
    "STANDALONE": _with_model(load_standalone, EagleWorker),
    "NGRAM": lambda context, target: NgramDrafter(context.speculative.num_steps),
}
"""Makes the drafter of each algorithm in `config/draft_algorithms.py`."""
