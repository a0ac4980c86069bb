"""What programs that start warm need not read or compute: a warm process has it, and so do its forks."""

from __future__ import annotations

import contextlib
import io
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

HEAD_DIMS = (16, 64)
"""Of the tests' tiny models, and of the embedded model."""


def prepare() -> None:
    """Read and compute it."""
    keep_tokenizer()
    keep_weights()
    make_body_schemas()
    resolve_config_types()
    find_shapes()
    shorten_measurement()


def prepare_for_forks() -> Callable[[], None]:
    """Read and compute it for forks of this process. Those that start programs call what this returns; all others work as usual.

    No thread is left, because forks would lack it. Before the embedded model is on this machine, each of them has to prepare itself.
    """
    from tqdm import tqdm

    from runtime.constrained import llguidance_backend
    from runtime.model_executor import depth_costs, model_loader
    from runtime.model_files.cache_folder import default_cache_dir
    from runtime.model_files.embedded import converted_folder
    from runtime.model_files.gguf_convert import is_converted
    from runtime.models.weights import WeightTable
    from runtime.text.tokenizer import Tokenizer

    if not is_converted(converted_folder(default_cache_dir())):
        return prepare
    places = (
        (Tokenizer, "load"),
        (WeightTable, "load"),
        (model_loader, "model_weights"),
        (llguidance_backend, "LLTokenizer"),
        (depth_costs, "BUDGET"),
    )

    def values() -> list[object]:
        return [vars(owner)[name] for owner, name in places]

    def replace_by(new: list[object]) -> None:
        for (owner, name), value in zip(places, new, strict=True):
            setattr(owner, name, value)

    usual, threads, deadline = values(), os.listdir("/proc/self/task"), time.monotonic() + 60.0
    with patch.dict(os.environ, {"TOKENIZERS_PARALLELISM": "false"}), patch.object(tqdm, "monitor_interval", 0):
        prepare()
    prepared = values()
    replace_by(usual)
    while os.listdir("/proc/self/task") != threads:
        assert time.monotonic() < deadline, "a thread is left"
        time.sleep(0.01)
    return lambda: replace_by(prepared)


def keep_tokenizer() -> None:
    """Keep the embedded model's tokenizer, as the package and llguidance read it: a server reads it six times, 1.3 s of a core.

    All forks have it. Other tokenizers and templates are read as usual, and this one too where the model is not on this machine yet.
    """
    from runtime.constrained import llguidance_backend
    from runtime.entrypoints.grammar_process import GrammarBackendConfig
    from runtime.entrypoints.grammars import eos_ids_of
    from runtime.model_files.cache_folder import default_cache_dir
    from runtime.model_files.embedded import converted_folder
    from runtime.model_files.gguf_convert import is_converted
    from runtime.models.registry import load_hf_config
    from runtime.text.tokenizer import Tokenizer

    folder = converted_folder(default_cache_dir())
    if not is_converted(folder):
        return
    path, load, make, made = str(folder), Tokenizer.load, llguidance_backend.LLTokenizer, dict[object, object]()
    kept = load(path)
    kept.encode_chat([{"role": "user", "content": "a"}])  # makes what the first use makes
    assert kept.longest_token  # is computed once

    def load_or_keep(folder: str | Path, *, chat_template: str | None = None) -> Tokenizer:
        return kept if (str(folder), chat_template) == (path, None) else load(folder, chat_template=chat_template)

    def make_once(definition: str, *, n_vocab: int, eos_token: list[int]) -> object:
        key = definition, n_vocab, tuple(eos_token)
        if key not in made:
            made[key] = make(definition, n_vocab=n_vocab, eos_token=eos_token)
        return made[key]

    Tokenizer.load = load_or_keep  # type: ignore[assignment, method-assign]
    llguidance_backend.LLTokenizer = make_once  # type: ignore[assignment, misc]
    model = load_hf_config(folder)
    GrammarBackendConfig(name="llguidance", tokenizer_path=path, eos_ids=eos_ids_of(path, model), vocab_size=model.vocab_size).load()


def keep_weights() -> None:
    """Keep the embedded model's weights in the form of the default start: quantising them takes a server 1.3 s of a core.

    All forks share them. Ranks, drafts and other quantisations load their weights as usual. Nothing is kept if torch has several
    threads, because OpenMP's threads do not survive a fork.
    """
    import torch

    from runtime.config.flag_parser import from_fields
    from runtime.entrypoints.prepare import prepare
    from runtime.model_executor import model_loader
    from runtime.model_executor.context import AS_CONFIGURED, WorkerContext, make_context
    from runtime.model_files.cache_folder import default_cache_dir
    from runtime.model_files.embedded import converted_folder
    from runtime.model_files.gguf_convert import is_converted
    from runtime.models.weights import NamedTensors, WeightTable

    if torch.get_num_threads() > 1 or not is_converted(converted_folder(default_cache_dir())):
        return
    config, model = prepare(from_fields({"device": "cpu", "speculative_algorithm": "none"}))
    named, path, quantization = model_loader.model_weights, config.model.model_path, config.model.quantization
    load, kept = WeightTable.load, list[torch.Tensor]()

    class OfEmbedded(list[Any]):
        """The weights of the embedded model, as `load` gets them."""

        def close(self) -> None:
            """End the generator, as `load_weights` does."""
            self[0].close()

    def weights_of(context: WorkerContext, shapes: dict[str, tuple[int, ...]], folder: str, load_format: str) -> NamedTensors:
        found = named(context, shapes, folder, load_format)
        alike = (folder, context.config.model.quantization, context.dtype, context.group.size) == (path, quantization, torch.float32, 1)
        return OfEmbedded([found]) if alike else found

    def load_or_share(table: WeightTable, weights: NamedTensors, *names: tuple[str, ...]) -> None:
        if not isinstance(weights, OfEmbedded):
            load(table, weights, *names)
        elif kept:
            for own, shared in zip(table._tensors, kept, strict=True):
                own.set_(shared)
        else:
            load(table, weights[0], *names)
            kept.extend(table._tensors)

    model_loader.model_weights, WeightTable.load = weights_of, load_or_share  # type: ignore[assignment, method-assign]
    with contextlib.redirect_stderr(io.StringIO()):  # no progress bar among the lines of tests
        model_loader.load_model(make_context(config, AS_CONFIGURED), model, path, config.model.load_format, quantization)


def make_body_schemas() -> None:
    """Make the JSON schemas of all request bodies, which take a server 0.15 s of a core."""
    from pydantic import BaseModel

    from runtime.entrypoints.http.body_schema import BodySchema

    def models(base: type[BaseModel]) -> Iterator[type[BaseModel]]:
        for model in base.__subclasses__():
            yield model
            yield from models(model)

    for model in models(BaseModel):
        if model.__module__.startswith("runtime."):
            BodySchema(model)


def resolve_config_types() -> None:
    """Resolve the annotations of a server's configuration, which takes each child process 0.02 s of a core."""
    import msgspec

    from runtime.config.runtime_config import RuntimeConfig

    msgspec.json.Decoder(RuntimeConfig)


def find_shapes() -> None:
    """Find by trial the shapes of attention of the tests' tiny models and of the embedded model: each rank would take 0.05 s of a core."""
    import torch

    from runtime.layers.attention.stable_shapes import HeadKind, find_stable_shapes

    for head_dim in HEAD_DIMS:
        find_stable_shapes(frozenset({HeadKind(head_dim, head_dim, torch.float32)}))


def shorten_measurement() -> None:
    """Let depth controllers start from the first times that they measure: all of them take two seconds of a core of each server."""
    from runtime.model_executor import depth_costs

    depth_costs.BUDGET = 0.2
