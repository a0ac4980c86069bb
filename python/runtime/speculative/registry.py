"""Makes the drafter of the configured algorithm."""

from __future__ import annotations

import pkgutil

from runtime.config.draft_algorithms import ALGORITHM_CAPS
from runtime.model_executor.build import MakeDrafter
from runtime.model_executor.context import WorkerContext
from runtime.model_executor.drafter import Drafter, NoDrafter
from runtime.models.decoder import DecoderModel


def make_drafter(context: WorkerContext, target: DecoderModel) -> Drafter:
    """The configured drafter, loaded for its target. Raises `ConfigError` if they do not fit."""
    config = context.config.speculative
    if config is None:
        return NoDrafter()
    make: MakeDrafter = pkgutil.resolve_name(ALGORITHM_CAPS[config.algorithm].drafter)
    return make(context, target)
