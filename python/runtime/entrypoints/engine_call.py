"""Converts arguments of the offline engine into bodies of the endpoints: one of /generate per prompt, or one of /v1/embeddings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from difflib import get_close_matches
from typing import Annotated, Any, TypeGuard

import msgspec
from pydantic import Field

from runtime.entrypoints.http.body import Text, TokenIds
from runtime.entrypoints.http.body_schema import read_body
from runtime.entrypoints.http.refused import NO_EFFECT, REFUSED
from runtime.entrypoints.native.protocol import GenerateBody, NativeSampling
from runtime.entrypoints.pooling.protocol import EmbeddingBody, Inputs
from runtime.errors import InvalidField, RequestError
from runtime.sampling_params import SamplingParams

SamplingLike = Mapping[str, Any] | SamplingParams | None

TAKES = {"prompt": "a string or a list of strings", "input_ids": "a list of token ids or a list of such lists; use .tolist() of an array"}
EACH = ("sampling_params", "rid", "return_logprob", "logprob_start_len", "top_logprobs_num", "cache_salt")
"""Arguments that take one value for all prompts or a list with one per prompt."""


class PromptBody(GenerateBody):
    """The arguments for one prompt. `prompt` is the engine's name for `text`."""

    text: Annotated[Text | None, Field(alias="prompt")] = None  # pyright: ignore[reportIncompatibleVariableOverride]
    input_ids: TokenIds | None = None  # pyright: ignore[reportIncompatibleVariableOverride]

    @property
    def prompt_field(self) -> str:
        """The argument that holds the prompt."""
        return "input_ids" if self.text is None else "prompt"


class EncodeBody(EmbeddingBody):
    """The arguments of `Engine.encode`. `prompt` is the engine's name for `input`."""

    input: Annotated[Inputs, Field(alias="prompt")]  # pyright: ignore[reportIncompatibleVariableOverride]


def read_encode(prompt: object, dimensions: int | None) -> EncodeBody:
    """Return the body. Raises `RequestError` if an argument is out of bounds."""
    given = [list(one) if _is_list(one) else one for one in prompt] if _is_list(prompt) else prompt
    return read_body(EncodeBody, {"prompt": given, "dimensions": dimensions})


def read_call(arguments: Mapping[str, Any]) -> tuple[list[PromptBody], bool]:
    """Return one body per prompt, and whether the result is a list.

    Raises:
        RequestError: an argument is out of bounds or does not exist.
    """
    _check_names("generate has no argument", arguments, _ARGUMENTS)
    names = [name for name in TAKES if arguments.get(name) is not None]
    if len(names) != 1:
        raise RequestError("Give either prompt or input_ids.", "prompt")
    name, given = names[0], arguments[names[0]]
    many = _is_list(given) and not (name == "input_ids" and (not given or isinstance(given[0], int)))
    prompts = [_prompt(name, one) for one in (given if many else [given])]
    sampling = arguments.get("sampling_params")
    values = {**arguments, "sampling_params": [*map(_sampling, sampling)] if _is_list(sampling) else _sampling(sampling)}
    if many and isinstance(rid := values.get("rid"), str):
        values["rid"] = [f"{rid}-{index}" for index in range(len(prompts))]
    columns = {field: _each(field, values.get(field), len(prompts)) for field in EACH}
    bodies = [
        read_body(PromptBody, {**values, name: prompt, **{field: column[index] for field, column in columns.items()}})
        for index, prompt in enumerate(prompts)
    ]
    many = many or any(body.n != 1 for body in bodies)
    if many and arguments.get("stream"):
        raise RequestError("stream takes one prompt with n 1.", "stream")
    return bodies, many


def _prompt(name: str, given: object) -> object:
    if not (isinstance(given, str) if name == "prompt" else _is_list(given)):
        raise InvalidField(name, given, TAKES[name])
    return given if isinstance(given, str) else list(given)  # pyright: ignore[reportArgumentType]


def _sampling(given: object) -> object:
    """`sampling_params` of one prompt as JSON values: tuples and sets become arrays, and the keys of logit_bias become strings."""
    if isinstance(given, SamplingParams):
        given = {name: value for name, value in msgspec.structs.asdict(given).items() if value not in (None, ())}
    if not isinstance(given, Mapping):
        return given
    _check_names("sampling_params has no field", given, NativeSampling.model_fields)
    values = {name: list(value) if isinstance(value, tuple | Set) else value for name, value in given.items()}
    if isinstance(bias := values.get("logit_bias"), Mapping):
        values["logit_bias"] = {str(token): value for token, value in bias.items()}
    return values


def _each(name: str, value: Any, count: int) -> list[Any]:
    """One value per prompt."""
    if not _is_list(value):
        return [value] * count
    if len(value) != count:
        raise InvalidField(name, value, f"one value, or one per prompt ({count})")
    return list(value)


def _check_names(complaint: str, given: Mapping[str, Any], known: Iterable[str]) -> None:
    """Refuse unknown names; the body refuses known fields that this server does not support."""
    for name in given.keys() - set(known) - REFUSED.keys() - NO_EFFECT:
        if given[name] is not None:
            likely = get_close_matches(name, known, 1)
            raise RequestError(f"{complaint} {name}{f'; did you mean {likely[0]}?' if likely else '.'}", name)


def _is_list(value: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))


_ARGUMENTS = {field.alias or name for name, field in PromptBody.model_fields.items()} - {"model"}
