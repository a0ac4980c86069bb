"""The arguments of one call of the offline engine, checked and spread over its prompts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from runtime.entrypoints.http.refused import NO_EFFECT, REFUSED, changes_nothing
from runtime.errors import InvalidField, RequestError, UnsupportedField
from runtime.sampling_params import SamplingDefaults, SamplingParams

Prompt = str | list[int]
SamplingLike = Mapping[str, Any] | SamplingParams | None


@dataclass(frozen=True)
class Asked:
    """What a call asks for beside its prompts: one value for all prompts, or a list with one per prompt."""

    return_logprob: bool | Sequence[bool] | None = False
    logprob_start_len: int | Sequence[int] | None = None
    top_logprobs_num: int | Sequence[int] | None = None
    rid: str | Sequence[str] | None = None
    cache_salt: str | Sequence[str] | None = None


@dataclass(frozen=True)
class Job:
    """One prompt.

    Attributes:
        top_logprobs: -1 for no log-probabilities, else how many beside each chosen token.
        logprobs_from: the first prompt token whose log-probability is wanted; -1 for none.
        n: how many texts.
        prompt_only: read the prompt and generate nothing.
    """

    prompt: Prompt
    sampling: SamplingParams
    n: int
    prompt_only: bool
    top_logprobs: int
    logprobs_from: int
    rid: str | None
    cache_salt: str


class Jobs:
    """The prompts of one call. `many`: whether it is answered with a list."""

    def __init__(
        self,
        prompt: object,
        input_ids: object,
        sampling_params: object,
        defaults: SamplingDefaults,
        asked: Asked,
        others: Mapping[str, object],
    ) -> None:
        _refuse(others)
        if (prompt is None) == (input_ids is None):
            raise InvalidField("prompt", prompt, "given, or input_ids instead")
        prompts, self.many = _id_lists(input_ids) if prompt is None else _texts(prompt)
        count = len(prompts)
        given = list(sampling_params) if _is_list(sampling_params) else [sampling_params] * count
        if len(given) != count:
            raise InvalidField("sampling_params", given, f"one mapping, or one per prompt ({count})")
        names = _each("rid", asked.rid, count)
        if isinstance(asked.rid, str) and self.many:
            names = [f"{asked.rid}-{index}" for index in range(count)]
        columns = zip(
            prompts,
            given,
            _each("return_logprob", asked.return_logprob, count),
            _each("logprob_start_len", asked.logprob_start_len, count),
            _each("top_logprobs_num", asked.top_logprobs_num, count),
            names,
            _each("cache_salt", asked.cache_salt, count),
            strict=True,
        )
        self.each = [_job(defaults, *row) for row in columns]
        self.many = self.many or any(job.n != 1 for job in self.each)

    def check_single(self) -> None:
        """Raise `InvalidField` for several prompts or texts."""
        if self.many:
            raise InvalidField("prompt", [job.prompt for job in self.each], "one prompt, with n 1, with stream")


def _job(defaults: SamplingDefaults, prompt: Prompt, given: object, logprob: Any, start: Any, top: Any, rid: Any, salt: Any) -> Job:
    if not isinstance(given, Mapping | SamplingParams | None):
        raise InvalidField("sampling_params", given, "a mapping, a SamplingParams, or one of these per prompt")
    values = {name: value for name, value in given.items() if value is not None} if isinstance(given, Mapping) else {}
    n, prompt_only = values.pop("n", 1), values.get("max_new_tokens") == 0
    values |= {"max_new_tokens": 1} if prompt_only else {}
    sampling = given if isinstance(given, SamplingParams) else _sampling(values, defaults)
    start = -1 if start is None or not logprob else start
    return Job(prompt, sampling, n, prompt_only, top or 0 if logprob else -1, start, rid, salt or "")


def _each(name: str, value: Any, count: int) -> list[Any]:
    """One value per prompt."""
    if not _is_list(value):
        return [value] * count
    if len(value) != count:
        raise InvalidField(name, value, f"one value, or one per prompt ({count})")
    return list(value)


def _refuse(others: Mapping[str, object]) -> None:
    """Refuse SGLang's arguments that would change the output, and names that are no arguments at all."""
    for name, value in others.items():
        if not _without_effect(name, value):
            raise RequestError(f"generate has no argument {name}.", name)


def _without_effect(name: str, value: object) -> bool:
    """Whether a value that SGLang knows changes nothing here. Raises `UnsupportedField` if it would."""
    if changes_nothing(name, value) or name in NO_EFFECT:
        return True
    if name in REFUSED:
        raise UnsupportedField(name, REFUSED[name])
    return False


def _texts(prompt: object) -> tuple[list[Prompt], bool]:
    if isinstance(prompt, str):
        return [prompt], False
    if not _is_list(prompt) or not all(isinstance(one, str) for one in prompt):
        raise InvalidField("prompt", prompt, "a text or a list of texts")
    return list(prompt), True


def _id_lists(input_ids: object) -> tuple[list[Prompt], bool]:
    """One list per prompt; the manager checks the ids."""
    if _is_list(input_ids):
        if not input_ids or isinstance(input_ids[0], int):
            return [list(input_ids)], False
        if all(_is_list(row) for row in input_ids):
            return [list(row) for row in input_ids], True
    raise InvalidField("input_ids", input_ids, "a list of token ids or a list of such lists; use .tolist() of an array")


def _is_list(value: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))


def _sampling(given: Mapping[str, Any], defaults: SamplingDefaults) -> SamplingParams:
    values = {**defaults.given(), **given}
    values["seed"] = values.pop("sampling_seed", values.get("seed"))
    for name in values.keys() - set(SamplingParams.__struct_fields__):
        if not _without_effect(name, values.pop(name)):
            raise InvalidField("sampling_params", name, f"made of n, sampling_seed, {', '.join(SamplingParams.__struct_fields__)}")
    for name in ("stop", "stop_token_ids"):
        value = values.get(name, ())
        values[name] = (value,) if isinstance(value, str) else tuple(value or ()) if isinstance(value, Iterable | None) else value
    return SamplingParams(**values)
