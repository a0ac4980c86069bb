"""Where a model comes from: the embedded one, a folder, the Hugging Face hub, a GGUF file, or a configuration alone."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from runtime.errors import ConfigError
from runtime.model_files.cache_folder import build_once, default_cache_dir
from runtime.model_files.embedded import NAME as EMBEDDED_NAME
from runtime.model_files.embedded import embedded_folder
from runtime.model_files.gguf_convert import converted_folder
from runtime.model_files.safetensors_writer import is_whole_safetensors
from runtime.model_files.synthetic_tokenizer import is_synthetic_tokenizer, write_synthetic_tokenizer

__all__ = ["DRAFT_FLAGS", "ModelSource", "default_cache_dir", "resolve_model", "resolve_weights"]

logger = logging.getLogger(__name__)

WeightsKind = Literal["safetensors", "dummy"]
LOAD_FORMATS = ("auto", "safetensors", "gguf", "dummy")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_TOKENIZER_FILES = ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "chat_template.json"]
_CONFIG_FILES = ["config.json", "generation_config.json"]
_WEIGHT_FILES = ["*.safetensors", "model.safetensors.index.json"]


class SourceFlags(NamedTuple):
    """The flags that a model was asked for with, to be named where it cannot be had."""

    path: str = "--model-path"
    load_format: str = "--load-format"


TARGET_FLAGS = SourceFlags()
DRAFT_FLAGS = SourceFlags("--speculative-draft-model-path", "--speculative-draft-load-format")


class ModelSource(msgspec.Struct, frozen=True, kw_only=True):
    """A model on this machine, ready to load.

    Attributes:
        weights_folder: Hugging Face style: config.json, and safetensors unless `kind` is dummy.
        kind: whether weights are read or drawn at random.
        tokenizer_folder: holds tokenizer.json.
        served_name: what clients call the model unless --served-model-name says otherwise.
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
    cache_dir: Path | None = None,
    progress: bool = True,
) -> ModelSource:
    """Bring the model that the user asked for onto this machine.

    Args:
        model_path: a folder, a hub id `owner/name`, a `.gguf` file; None for the embedded model.
        load_format: auto, safetensors, gguf, or dummy (random weights; a config.json suffices).
        tokenizer_path: a folder or hub id, where the tokenizer is not with the model.
        revision: branch, tag or commit on the hub.
        cache_dir: for what is fetched and converted; `default_cache_dir()` if None.
        progress: show progress bars.

    Raises:
        ConfigError: it cannot be had as asked; one line with the way out.
    """
    cache_dir = cache_dir or default_cache_dir()
    if model_path is None:
        _refuse_for_embedded(load_format, revision)
        folder = embedded_folder(cache_dir, progress)
        tokenizer = _tokenizer_folder(folder, "safetensors", tokenizer_path, None, cache_dir)
        return ModelSource(
            weights_folder=str(folder), kind="safetensors", tokenizer_folder=str(tokenizer), served_name=EMBEDDED_NAME, is_embedded=True
        )
    weights, kind = resolve_weights(model_path, load_format=load_format, revision=revision, cache_dir=cache_dir, progress=progress)
    tokenizer = _tokenizer_folder(Path(weights), kind, tokenizer_path, revision, cache_dir)
    return ModelSource(weights_folder=weights, kind=kind, tokenizer_folder=str(tokenizer), served_name=_served_name(model_path))


def resolve_weights(
    model_path: str,
    *,
    load_format: str = "auto",
    revision: str | None = None,
    cache_dir: Path | None = None,
    progress: bool = True,
    flags: SourceFlags = TARGET_FLAGS,
) -> tuple[str, WeightsKind]:
    """Bring weights and configuration alone, as for draft models. Arguments and errors as for `resolve_model`; `flags` are named in errors.

    Returns:
        A Hugging Face style folder, and whether its weights are to be read.
    """
    if load_format not in LOAD_FORMATS:
        raise ConfigError(f"{flags.load_format} {load_format!r} is unknown; it must be one of {', '.join(LOAD_FORMATS)}")
    path = Path(model_path).expanduser()
    if path.is_dir():
        return str(path), _check_folder(path, load_format, flags)
    if path.is_file() or path.suffix == ".gguf":
        return str(_from_gguf(path, load_format, revision, cache_dir or default_cache_dir(), progress, flags)), "safetensors"
    if not _HUB_ID.fullmatch(model_path):
        raise ConfigError(f"{flags.path} {model_path!r} is neither a folder, a .gguf file, nor a hub id 'owner/name'")
    if load_format == "gguf":
        raise ConfigError(f"{flags.load_format} gguf takes a file; download the .gguf of {model_path} and give its path as {flags.path}")
    wanted = [*_CONFIG_FILES, *_TOKENIZER_FILES, *([] if load_format == "dummy" else _WEIGHT_FILES)]
    folder = _download(model_path, revision, wanted, flags.path)
    return str(folder), _check_folder(folder, load_format, flags)


def _refuse_for_embedded(load_format: str, revision: str | None) -> None:
    if load_format not in ("auto", "gguf"):
        raise ConfigError(f"--load-format {load_format} needs a --model-path")
    if revision is not None:
        raise ConfigError("--revision needs a --model-path that names a model of the hub")


def _served_name(model_path: str) -> str:
    path = Path(model_path).expanduser()
    if path.is_dir():
        return path.resolve().name or model_path
    return path.stem if path.is_file() else model_path


# ---- weights


def _check_folder(folder: Path, load_format: str, flags: SourceFlags) -> WeightsKind:
    if load_format == "gguf":
        raise ConfigError(f"{flags.load_format} gguf takes a file, and {folder} is a folder; give the .gguf file as {flags.path}")
    _read_object(folder / "config.json", f"{folder} is no model folder: it lacks a config.json")
    if load_format == "dummy":
        return "dummy"
    _check_shards(folder, flags)
    return "safetensors"


def _check_shards(folder: Path, flags: SourceFlags) -> None:
    """Refuse a folder whose weights are missing, incomplete, or in a format that can run code."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        shards = _read_object(index, "").get("weight_map")
        if not isinstance(shards, dict) or not shards:
            raise ConfigError(f"{index} names no shards; download it again")
        files = [folder / str(name) for name in sorted(set(shards.values()))]
    else:
        files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise _no_weights(folder, flags)
    for file in files:
        if not is_whole_safetensors(file):
            raise ConfigError(f"{file} is {'truncated or damaged' if file.exists() else 'missing'}; download it again")


def _no_weights(folder: Path, flags: SourceFlags) -> ConfigError:
    pickles = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
    if pickles:
        return ConfigError(
            f"{folder} holds weights only as pickles ({pickles[0]}), which can run code; convert them to safetensors, "
            "for example with transformers' save_pretrained, or use a revision that has them"
        )
    ggufs = sorted(path.name for path in folder.glob("*.gguf"))
    if ggufs:
        return ConfigError(f"{folder} holds GGUF files and no safetensors; give one as {flags.path}, for example {folder / ggufs[0]}")
    return ConfigError(f"{folder} holds no .safetensors file; download the weights, or draw random ones with {flags.load_format} dummy")


def _from_gguf(path: Path, load_format: str, revision: str | None, cache_dir: Path, progress: bool, flags: SourceFlags) -> Path:
    if load_format not in ("auto", "gguf"):
        raise ConfigError(f"{flags.load_format} {load_format} does not go with the file {path}; leave it out, or give a folder")
    if revision is not None:
        raise ConfigError(f"--revision goes with a model of the hub, and {path} is a file")
    return converted_folder(path, cache_dir, progress)


def _read_object(path: Path, missing: str) -> dict[str, object]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(missing or f"{path} is missing") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is not valid JSON: {str(error)[:120]}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} is not a JSON object")
    return content


# ---- tokenizers


def _tokenizer_folder(weights: Path, kind: WeightsKind, tokenizer_path: str | None, revision: str | None, cache_dir: Path) -> Path:
    if tokenizer_path is not None:
        return _given_tokenizer(tokenizer_path, revision)
    if (weights / "tokenizer.json").is_file():
        return weights
    if kind == "dummy":
        return _synthetic(weights, cache_dir)
    raise ConfigError(f"{weights} has no tokenizer.json; give a folder or hub id that has one as --tokenizer-path")


def _given_tokenizer(tokenizer_path: str, revision: str | None) -> Path:
    folder = Path(tokenizer_path).expanduser()
    if folder.is_file() and folder.name == "tokenizer.json":
        folder = folder.parent
    if not folder.is_dir():
        if not _HUB_ID.fullmatch(tokenizer_path):
            raise ConfigError(f"--tokenizer-path {tokenizer_path!r} is neither a folder nor a hub id 'owner/name'")
        folder = _download(tokenizer_path, revision, [*_CONFIG_FILES, *_TOKENIZER_FILES], "--tokenizer-path")
    if not (folder / "tokenizer.json").is_file():
        raise ConfigError(f"--tokenizer-path {tokenizer_path}: there is no tokenizer.json")
    return folder


def _synthetic(weights: Path, cache_dir: Path) -> Path:
    vocab_size = _read_object(weights / "config.json", "").get("vocab_size")
    if not isinstance(vocab_size, int) or not 0 < vocab_size <= 1 << 22:
        raise ConfigError(f"{weights / 'config.json'} has no usable vocab_size")
    logger.info("no tokenizer beside the dummy weights: using a synthetic one of %d ids", vocab_size)
    build = lambda folder: write_synthetic_tokenizer(folder, vocab_size)  # noqa: E731
    return build_once(cache_dir, f"synthetic-tokenizer-{vocab_size}", build, is_synthetic_tokenizer)


# ---- the hub


def _download(model_id: str, revision: str | None, patterns: list[str], flag: str) -> Path:
    """Fetch the files of a hub model that can hold no code, or find them in the hub's own cache."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError

    try:
        return Path(snapshot_download(model_id, revision=revision, allow_patterns=patterns, ignore_patterns=["*/*", "consolidated*"]))
    except GatedRepoError as error:
        raise ConfigError(f"{model_id} is gated: accept its terms on the hub and log in with 'hf auth login'") from error
    except RevisionNotFoundError as error:
        raise ConfigError(f"{model_id} has no revision {revision!r}") from error
    except RepositoryNotFoundError as error:
        raise ConfigError(f"{model_id!r} is no folder here, and on the hub it is missing or private ('hf auth login')") from error
    except (LocalEntryNotFoundError, OSError, ValueError) as error:
        raise ConfigError(
            f"{model_id} is not in the local cache and the hub cannot be reached ({type(error).__name__}); "
            f"download it where there is a network and give the folder as {flag}"
        ) from error
