"""Reads a draft model's config.json and checks it against the algorithm and the target. Does not import torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime.config.draft_algorithms import ALGORITHM_CAPS, DraftFormat, SpecAlgorithm
from runtime.config.quant_config import with_flag
from runtime.config.runtime_config import SpeculativeConfig
from runtime.errors import ConfigError
from runtime.model_files.checkpoint_folder import tensor_places
from runtime.model_files.tied_head import HEAD
from runtime.models import dflash_config, llama, mistral, qwen2, qwen3
from runtime.models.config import ModelConfig
from runtime.models.config_fields import ConfigFields
from runtime.models.dflash_config import DraftBlock
from runtime.models.eagle3_layout import EAGLE3_CLASS, FIRST_LAYOUT, Eagle3Layout, read_aux_layers
from runtime.models.hf_config import read_hf_config, sliding_windows
from runtime.models.registry import FAMILIES, MTP_CLASSES, Family, of_checkpoint, parse_family, parse_hf_config
from runtime.models.speculators_layout import flattened, layer_type

DRAFT_FAMILIES: dict[str, Family] = {
    "LlamaForCausalLMEagle": llama,
    EAGLE3_CLASS: llama,
    "Qwen2ForCausalLMEagle": qwen2,
    # The first published heads have their target's class name.
    "LlamaForCausalLM": llama,
    "Qwen2ForCausalLM": qwen2,
}
"""The family in whose format a head's config.json is written, by class name."""
LAYER_FAMILIES: dict[str, Family] = {"llama": llama, "qwen3": qwen3}
"""The family of a head's nested decoder layer, by its `model_type`."""
PADDING = 1024
"""The most ids of the target that a whole model may lack, and at most an eighth: sizes of one family differ in padding (Qwen 2.5 has 128
more from 7B on)."""
DFLASH_CLASS = "DFlashDraftModel"
MTP_HINT = "leave out --speculative-draft-model-path to draft with the target's layer for multi-token prediction"
"""For users of SGLang, which also takes the path of such a layer, or of the target."""


@dataclass(frozen=True, slots=True)
class DraftConfig:
    """A draft's architecture.

    Attributes:
        model: its decoder; `max_context_len` is the target's, since published heads state their training length instead.
        aux_layers: EAGLE-3 and DFlash: target layers whose input the draft reads, for `DecoderModel.forward`; () for drafts that read the
            target's last state, or none.
        layout: EAGLE-3: the options in which published heads differ.
        draft_block: DFlash: how blocks are filled; None for other drafts.
    """

    model: ModelConfig
    aux_layers: tuple[int, ...] = ()
    layout: Eagle3Layout = FIRST_LAYOUT
    draft_block: DraftBlock | None = None


@dataclass(frozen=True, slots=True)
class _DraftFile:
    """The config.json of a draft.

    Attributes:
        folder: where it is.
        raw: its fields.
        flat: the same, with those of a nested layout at the top.
        name: the class name, as `_class_name`.
    """

    folder: str | Path
    raw: Mapping[str, Any]
    flat: Mapping[str, Any]
    name: str

    @property
    def where(self) -> str:
        """The folder, for error messages."""
        return str(self.folder)

    @property
    def fields(self) -> ConfigFields:
        """The fields, with `name` as the only class."""
        return ConfigFields({**self.flat, "architectures": [self.name]}, self.where)


def load_draft_config(folder: str | Path, algorithm: SpecAlgorithm, target: ModelConfig) -> DraftConfig:
    """The draft in `folder`, for `target`.

    Raises:
        ConfigError: config.json is unreadable or unsupported, is a draft of another algorithm, or does not fit the
            target.
    """
    raw, where = read_hf_config(folder), str(folder)
    flat = flattened(raw, where)
    file = _DraftFile(folder, raw, flat, _class_name(flat, where))
    fitting, wanted = _formats(file), ALGORITHM_CAPS[algorithm].draft
    if wanted not in fitting:
        raise _of_another_algorithm(fitting[0], file)
    return READERS[wanted](file, algorithm, target)


def read_draft(speculative: SpeculativeConfig, target: ModelConfig) -> DraftConfig:
    """The draft in its own folder, with its quantisation by checkpoint and flag.

    Raises:
        ConfigError: as `load_draft_config`, or the flag does not suit the checkpoint.
    """
    assert speculative.draft_model_path is not None, "checked with the flags"
    found = load_draft_config(speculative.draft_model_path, speculative.algorithm, target)
    quant = with_flag(found.model.quant, speculative.draft_quantization, "--speculative-draft-model-quantization")
    return dataclasses.replace(found, model=dataclasses.replace(found.model, quant=quant))


def draft_block_size(folder: str | Path, algorithm: SpecAlgorithm) -> int | None:
    """Number of tokens per block of the draft in `folder`; None for an algorithm whose drafts do not fill blocks.

    Raises:
        ConfigError: as `read_block_size`.
    """
    return dflash_config.read_block_size(folder) if ALGORITHM_CAPS[algorithm].draft == "dflash" else None


# ---- one function per format


def _eagle(file: _DraftFile, algorithm: SpecAlgorithm, target: ModelConfig) -> DraftConfig:
    model = _fitted(_parse_head(file, algorithm), algorithm, target)
    _check_width(model.hidden_size, target)
    return DraftConfig(model)


def _eagle3(file: _DraftFile, algorithm: SpecAlgorithm, target: ModelConfig) -> DraftConfig:
    model = _untied(_fitted(_parse_head(file, algorithm), algorithm, target), file.folder)
    layers, layout = read_aux_layers(file.raw, target, file.where), Eagle3Layout.read(ConfigFields(file.flat, file.where))
    projects = layout.use_aux_hidden_state
    _check_width((projects and model.target_hidden_size) or model.hidden_size, target)
    return DraftConfig(model, layers if projects else (), layout)


def _dflash(file: _DraftFile, algorithm: SpecAlgorithm, target: ModelConfig) -> DraftConfig:
    layer_type(file.raw, "qwen3", ("qwen3",), file.where)
    model = _fitted(dflash_config.parse(file.fields), algorithm, target)
    _check_width(model.hidden_size, target)
    fields = ConfigFields(file.flat, file.where)
    layers, block = dflash_config.read_aux_layers(fields, target.num_layers), dflash_config.read_draft_block(fields, model)
    return DraftConfig(model, layers, draft_block=block)


def _model(file: _DraftFile, algorithm: SpecAlgorithm, target: ModelConfig) -> DraftConfig:
    model = of_checkpoint(parse_hf_config(file.raw, file.where), file.folder)
    return DraftConfig(_fitted(model, algorithm, target, min(PADDING, target.vocab_size // 8)))


READERS: dict[str, Callable[[_DraftFile, SpecAlgorithm, ModelConfig], DraftConfig]] = {
    "eagle": _eagle,
    "eagle3": _eagle3,
    "dflash": _dflash,
    "model": _model,
}
"""Reads the draft of each `DraftFormat`."""


def _parse_head(file: _DraftFile, algorithm: SpecAlgorithm) -> ModelConfig:
    """The decoder of a head. Raises `ConfigError` if its class is not supported."""
    fields, nested = file.fields, layer_type(file.raw, "llama", LAYER_FAMILIES, file.where)
    if file.name not in DRAFT_FAMILIES:
        raise fields.error(f"an {algorithm} head of class {file.name} is not supported; supported are {', '.join(DRAFT_FAMILIES)}")
    if nested is not None:
        return parse_family(LAYER_FAMILIES[nested], fields)
    model = parse_family(DRAFT_FAMILIES[file.name], fields)
    kinds = fields.get("layer_types", [])
    if isinstance(kinds, list) and "sliding_attention" not in kinds:
        return model
    return dataclasses.replace(model, window=sliding_windows(fields.with_defaults(mistral.DEFAULTS)) or model.window)


def _untied(draft: ModelConfig, folder: str | Path) -> ModelConfig:
    """The draft with the LM head in `folder`, if there is one: some config.json have `tie_word_embeddings` from their target."""
    if draft.tie_embeddings and any(name.removeprefix("model.") == HEAD for name in tensor_places(Path(folder))):
        return dataclasses.replace(draft, tie_embeddings=False)
    return draft


def _fitted(draft: ModelConfig, algorithm: SpecAlgorithm, target: ModelConfig, padding: int = 0) -> ModelConfig:
    """The draft with the target's context length. It may lack up to `padding` ids of the target's vocabulary.

    Raises:
        ConfigError: it has another vocabulary.
    """
    if not 0 <= target.vocab_size - draft.vocab_size <= padding:
        raise ConfigError(
            f"the draft has a vocabulary of {draft.vocab_size} and its target of {target.vocab_size}; "
            f"--speculative-algorithm {algorithm} needs one vocabulary for both"
        )
    return dataclasses.replace(draft, max_context_len=target.max_context_len)


def _check_width(width: int, target: ModelConfig) -> None:
    """Raise `ConfigError` if the states that a draft reads, of `width`, are not the target's."""
    if width != target.hidden_size:
        raise ConfigError(f"the draft head was made for a target of hidden size {width}; this one's is {target.hidden_size}")


# ---- formats by their files


def _class_name(raw: Mapping[str, Any], where: str) -> str:
    """The class name of a draft, with `EAGLE3_CLASS` for all its variants; some files of heads name none."""
    name = ConfigFields(raw, where).architecture() if raw.get("architectures") else "LlamaForCausalLM"
    return EAGLE3_CLASS if "eagle3" in name.lower() else name


def _formats(file: _DraftFile) -> tuple[DraftFormat, ...]:
    """The formats of which the file can be, the most likely first: a head may look like a model of one layer."""
    name, where = file.name, file.where
    if "dflash" in name.lower() or "dflash_config" in file.flat:
        return ("dflash",)
    if name.endswith(("NextN", "MTP")):
        raise ConfigError(f"{where}: draft architecture {name} is not supported; {MTP_HINT}")
    if name not in DRAFT_FAMILIES and name not in FAMILIES:
        known = ", ".join(dict.fromkeys([*DRAFT_FAMILIES, DFLASH_CLASS, *FAMILIES]))
        raise ConfigError(f"{where}: draft architecture {name} is not supported; supported are {known}")
    if name == EAGLE3_CLASS or "draft_vocab_size" in file.flat:
        return ("eagle3",)
    if name not in FAMILIES:
        return ("eagle",)
    return ("eagle", "model") if name in DRAFT_FAMILIES and file.flat.get("num_hidden_layers") == 1 else ("model",)


def _of_another_algorithm(found: DraftFormat, file: _DraftFile) -> ConfigError:
    """The error for a draft in the format `found`, which the requested algorithm does not read."""
    algorithm, name, where = next(name for name, caps in ALGORITHM_CAPS.items() if caps.draft == found), file.name, file.where
    if found == "dflash":
        return ConfigError(f"{where} is a {algorithm} draft; use --speculative-algorithm {algorithm}")
    if found != "model":
        return ConfigError(f"{where} is an {algorithm} head; use --speculative-algorithm {algorithm}")
    layers = file.flat.get("num_hidden_layers")
    hint = f", or name its class {name}Eagle in config.json if it is a head" if name in DRAFT_FAMILIES else ""
    hint = f", or {MTP_HINT}" if name in MTP_CLASSES else hint
    return ConfigError(f"{where} is a whole model ({name}, num_hidden_layers {layers}); use --speculative-algorithm {algorithm}{hint}")
