"""Converts a body of /generate into a `Call`."""

from __future__ import annotations

import uuid

from runtime.entrypoints.generations import Call
from runtime.entrypoints.native.protocol import GenerateBody
from runtime.managers.generation import RequestOptions
from runtime.sampling_params import SamplingDefaults, SamplingParams


def native_call(body: GenerateBody, defaults: SamplingDefaults) -> Call:
    """The call for `body`; `defaults` apply to sampling fields that are absent."""
    prompts, asked = body.prompts, body.logprobs
    return Call(
        name=body.rid if isinstance(body.rid, str) else "",
        prompts=prompts,
        sampling=[one.params(defaults) for one in body.samplings],
        rids=_rids(body.rid, len(prompts)),
        options=RequestOptions(
            n=body.n,
            stream=body.stream,
            top_logprobs=max(one.top for one in asked),
            prompt_logprobs=any(one.start >= 0 for one in asked),
            priority=body.priority,
            cache_salt=body.cache_salt,
            continues_prompt=True,
            running_counts=body.stream,
        ),
        prompt_only=[index for index, one in enumerate(body.samplings) if one.only_prompt],
        params={"prompt": body.prompt_field} | {name: f"sampling_params.{name}" for name in SamplingParams.__struct_fields__},
    )


def _rids(given: str | list[str] | None, count: int) -> list[str]:
    """One request id per prompt."""
    if isinstance(given, list):
        return given
    if given is None:
        return [uuid.uuid4().hex for _ in range(count)]
    return [given] if count == 1 else [f"{given}-{index}" for index in range(count)]
