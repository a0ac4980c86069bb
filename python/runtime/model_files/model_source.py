"""Resolves the source of a model: the embedded model, a folder, the Hugging Face hub, a GGUF file, or just a config.json."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Literal

import msgspec

from runtime.errors import ConfigError
from runtime.model_files.cache_folder import build_once, default_cache_dir
from runtime.model_files.checkpoint_folder import TARGET_FLAGS, SourceFlags, check_config, check_shards
from runtime.model_files.embedded import NAME as EMBEDDED_NAME
from runtime.model_files.embedded import embedded_folder
from runtime.model_files.gguf_convert import converted_folder
from runtime.model_files.hub import download, is_model_id
from runtime.model_files.synthetic_tokenizer import is_synthetic_tokenizer, write_synthetic_tokenizer

logger = logging.getLogger(__name__)

WeightsKind = Literal["safetensors", "dummy"]
_TOKENIZER_FILES = [
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "chat_template.json",
    "additional_chat_templates/tool_use.jinja",
]  # fmt: skip
_CONFIG_FILES = ["config.json", "generation_config.json", "hf_quant_config.json", "quantize_config.json", "quant_config.json"]
_WEIGHT_FILES = ["*.safetensors", "model.safetensors.index.json"]


DRAFT_FLAGS = SourceFlags("--speculative-draft-model-path", "--speculative-draft-load-format")


class ModelSource(msgspec.Struct, frozen=True, kw_only=True):
    """A model on this machine, ready to load.

    Attributes:
        weights_folder: a Hugging Face style folder with config.json, and with safetensors unless `kind` is dummy.
        kind: "safetensors", or "dummy" for random weights.
        tokenizer_folder: a folder with tokenizer.json.
        served_name: the name for clients, unless --served-model-name sets another.
        is_embedded: whether this is the default model.
    """

    weights_folder: str
    kind: WeightsKind
    tokenizer_folder: str
    served_name: str
    is_embedded: bool = False


def resolve_model(
    model_path: str | None,
    *,
    load_format: str = "auto",
    tokenizer_path: str | None = None,
    revision: str | None = None,
    download_dir: str | None = None,
    cache_dir: Path | None = None,
) -> ModelSource:
    """Find a model on this machine, or download and convert it.

    Args:
        model_path: a folder, a hub id `owner/name`, a `.gguf` file; None for the embedded model.
        load_format: auto, safetensors, gguf, or dummy (random weights; a config.json suffices).
        tokenizer_path: a folder or hub id, if the tokenizer is not with the model.
        revision: branch, tag or commit on the hub.
        download_dir: folder for models of the hub; the hub's own cache if None.
        cache_dir: folder for the embedded model and for conversions; `default_cache_dir()` if None.

    Raises:
        ConfigError: the model is not available in this form; the message says what to do.
    """
    cache_dir = cache_dir or default_cache_dir()
    if model_path is None:
        _refuse_for_embedded(load_format, revision)
        folder = embedded_folder(cache_dir)
        tokenizer = _tokenizer_folder(folder, "safetensors", tokenizer_path, None, cache_dir, download_dir)
        return ModelSource(
            weights_folder=str(folder), kind="safetensors", tokenizer_folder=str(tokenizer), served_name=EMBEDDED_NAME, is_embedded=True
        )
    weights, kind = resolve_weights(model_path, load_format=load_format, revision=revision, download_dir=download_dir, cache_dir=cache_dir)
    tokenizer = _tokenizer_folder(Path(weights), kind, tokenizer_path, revision, cache_dir, download_dir)
    return ModelSource(weights_folder=weights, kind=kind, tokenizer_folder=str(tokenizer), served_name=_served_name(model_path))


def resolve_weights(
    model_path: str,
    *,
    load_format: str = "auto",
    revision: str | None = None,
    download_dir: str | None = None,
    cache_dir: Path | None = None,
    flags: SourceFlags = TARGET_FLAGS,
) -> tuple[str, WeightsKind]:
    """Find or download only weights and configuration, for draft models.

    Arguments and errors are those of `resolve_model`; the messages name `flags`.

    Returns:
        A Hugging Face style folder, and the kind of its weights.
    """
    path = Path(os.path.expanduser(model_path))
    if os.path.isdir(path):
        return str(path), _check_folder(path, load_format, flags)
    if os.path.isfile(path) and path.suffix in (".safetensors", ".json"):
        raise ConfigError(f"{flags.path} {model_path!r} is one file of a model; give its folder, {str(path.parent)!r}")
    if os.path.isfile(path) or path.suffix == ".gguf":
        return str(_from_gguf(path, load_format, revision, cache_dir or default_cache_dir(), flags)), "safetensors"
    if not is_model_id(model_path):
        raise ConfigError(f"{flags.path} {model_path!r} is neither a folder, a .gguf file, nor a hub id 'owner/name'")
    if load_format == "gguf":
        raise ConfigError(f"{flags.load_format} gguf takes a file; download the .gguf of {model_path} and give its path as {flags.path}")
    wanted = [*_CONFIG_FILES, *_TOKENIZER_FILES, *([] if load_format == "dummy" else _WEIGHT_FILES)]
    folder = download(model_path, revision, wanted, flags.path, download_dir)
    return str(folder), _check_folder(folder, load_format, flags)


def _refuse_for_embedded(load_format: str, revision: str | None) -> None:
    if load_format not in ("auto", "gguf"):
        raise ConfigError(f"--load-format {load_format} needs a --model-path")
    if revision is not None:
        raise ConfigError("--revision needs a --model-path that names a model of the hub")


def _served_name(model_path: str) -> str:
    path = Path(os.path.expanduser(model_path))
    if path.is_dir():
        return path.resolve().name or model_path
    return path.stem if path.is_file() else model_path


# ---- weights


def _check_folder(folder: Path, load_format: str, flags: SourceFlags) -> WeightsKind:
    if load_format == "gguf":
        raise ConfigError(f"{flags.load_format} gguf takes a file, and {folder} is a folder; give the .gguf file as {flags.path}")
    check_config(folder)
    if load_format == "dummy":
        return "dummy"
    check_shards(folder, flags)
    return "safetensors"


def _from_gguf(path: Path, load_format: str, revision: str | None, cache_dir: Path, flags: SourceFlags) -> Path:
    if load_format not in ("auto", "gguf"):
        raise ConfigError(f"{flags.load_format} {load_format} does not apply to the file {path}; leave it out, or give a folder")
    if revision is not None:
        raise ConfigError(f"--revision applies to models of the hub, and {path} is a file")
    return converted_folder(path, cache_dir)


# ---- tokenizers


def _tokenizer_folder(
    weights: Path, kind: WeightsKind, tokenizer_path: str | None, revision: str | None, cache_dir: Path, download_dir: str | None
) -> Path:
    if tokenizer_path is not None:
        return _given_tokenizer(tokenizer_path, revision, download_dir)
    if (weights / "tokenizer.json").is_file():
        return weights
    if kind == "dummy":
        return _synthetic(weights, cache_dir)
    raise ConfigError(f"{weights} has no tokenizer.json; give a folder or hub id that has one as --tokenizer-path")


def _given_tokenizer(tokenizer_path: str, revision: str | None, download_dir: str | None) -> Path:
    folder = Path(os.path.expanduser(tokenizer_path))
    if os.path.isfile(folder) and folder.name == "tokenizer.json":
        folder = folder.parent
    if not os.path.isdir(folder):
        if not is_model_id(tokenizer_path):
            raise ConfigError(f"--tokenizer-path {tokenizer_path!r} is neither a folder nor a hub id 'owner/name'")
        folder = download(tokenizer_path, revision, [*_CONFIG_FILES, *_TOKENIZER_FILES], "--tokenizer-path", download_dir)
    if not (folder / "tokenizer.json").is_file():
        raise ConfigError(f"--tokenizer-path {tokenizer_path}: there is no tokenizer.json")
    return folder


def _synthetic(weights: Path, cache_dir: Path) -> Path:
    config = check_config(weights)
    text = config.get("text_config")  # in multimodal models
    vocab_size = (text if isinstance(text, dict) else config).get("vocab_size")
    if not isinstance(vocab_size, int) or not 0 < vocab_size <= 1 << 22:
        raise ConfigError(f"{weights / 'config.json'} has no usable vocab_size")
    logger.info("dummy weights have no tokenizer: using a synthetic one with %d ids", vocab_size)
    build = lambda folder: write_synthetic_tokenizer(folder, vocab_size)  # noqa: E731
    return build_once(cache_dir, f"synthetic-tokenizer-{vocab_size}", build, is_synthetic_tokenizer)
