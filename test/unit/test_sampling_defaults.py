"""What a request is sampled with where it says nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from front import ScriptedScheduler, front

from event_loop import in_event_loop
from runtime.config.flag_parser import from_fields
from runtime.config.resolve import check
from runtime.entrypoints import prepare
from runtime.entrypoints.engine_call import read_call
from runtime.entrypoints.native.output import native_call
from runtime.errors import ConfigError
from runtime.model_files.model_source import ModelSource
from runtime.models.hf_config import recommended_sampling
from runtime.sampling_params import SamplingDefaults, SamplingParams

HI = [{"role": "user", "content": "hi"}]
MODEL = SamplingDefaults(temperature=0.2, top_p=0.9, top_k=20, repetition_penalty=1.1)
PREFERRED = SamplingDefaults(temperature=0.5)


async def sampled(path: str, body: dict[str, Any], **config: object) -> SamplingParams:
    scheduler = ScriptedScheduler()
    async with front(scheduler, **config) as f:
        assert (await f.post(path, body)).status_code == 200
    return scheduler.requests[-1].sampling


@pytest.mark.parametrize(("path", "body"), [("/v1/chat/completions", {"messages": HI}), ("/v1/completions", {"prompt": "x"})])
@in_event_loop
async def test_openai_requests_take_the_models_defaults(path: str, body: dict[str, Any]) -> None:
    left_out = await sampled(path, body, default_sampling_params=MODEL)
    assert (left_out.temperature, left_out.top_p, left_out.top_k, left_out.repetition_penalty) == (0.2, 0.9, 20, 1.1)
    given = await sampled(path, {**body, "temperature": 1.0, "top_k": -1, "top_p": None}, default_sampling_params=MODEL)
    assert (given.temperature, given.top_p, given.top_k) == (1.0, 0.9, -1)
    assert (await sampled(path, body)).temperature == 1.0


@in_event_loop
async def test_native_requests_take_only_the_preferred_parameters() -> None:
    config = {"default_sampling_params": PREFERRED.over(MODEL), "preferred_sampling_params": PREFERRED}
    sampling = await sampled("/generate", {"text": "x"}, **config)
    assert (sampling.temperature, sampling.top_p) == (0.5, 1.0)
    assert (await sampled("/generate", {"text": "x", "sampling_params": {"temperature": 0.0}}, **config)).temperature == 0.0
    (body,), _ = read_call({"prompt": "a", "sampling_params": [{"top_k": 3, "top_p": None}]})
    assert native_call(body, PREFERRED).sampling == [SamplingParams(temperature=0.5, top_k=3)]


@in_event_loop
async def test_the_defaults_are_shown() -> None:
    async with front(default_sampling_params=MODEL, preferred_sampling_params=PREFERRED) as f:
        info = (await f.client.get("/get_model_info")).json()
        card = (await f.client.get("/v1/models")).json()["data"][0]
        assert info["default_sampling_params"] == card["default_sampling_params"] == MODEL.complete()
        assert MODEL.complete()["min_p"] == 0.0
        assert info["preferred_sampling_params"] == {"temperature": 0.5}
    async with front() as f:
        assert (await f.client.get("/get_model_info")).json()["preferred_sampling_params"] is None


def test_generation_config_is_read_and_checked(tmp_path: Path) -> None:
    assert recommended_sampling(tmp_path) == SamplingDefaults()
    file = tmp_path / "generation_config.json"
    file.write_text(json.dumps({"temperature": 0.6, "top_k": 20, "top_p": None, "do_sample": True, "eos_token_id": 1}))
    assert recommended_sampling(tmp_path).given() == {"temperature": 0.6, "top_k": 20}
    for bad in ({"temperature": "hot"}, {"top_p": 7}, {"top_k": 1.5}):
        file.write_text(json.dumps(bad))
        with pytest.raises(ConfigError, match=f"{next(iter(bad))}.*--sampling-defaults openai"):
            recommended_sampling(tmp_path)


def test_sampling_defaults_openai_ignores_the_model() -> None:
    source = ModelSource(weights_folder="/nowhere", kind="dummy", tokenizer_folder="", served_name="m", is_embedded=True)
    assert prepare._sampling(from_fields({}), source).given() == {"temperature": 0.2, "top_p": 0.9}
    assert prepare._sampling(from_fields({"sampling_defaults": "openai"}), source) == SamplingDefaults()


@pytest.mark.parametrize(
    ("text", "words"), [("{", "not JSON"), ("[]", "JSON object"), ('{"tempo": 1}', "tempo"), ('{"temperature": 300}', "temperature")]
)
def test_bad_preferred_parameters_are_refused(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=f"--preferred-sampling-params.*{words}"):
        check(from_fields({"preferred_sampling_params": text}))


@in_event_loop
async def test_details_of_drafts_and_of_the_cache_come_when_asked_for() -> None:
    spec = {
        "spec_accept_rate": 8 / 12, "spec_accept_length": 3.0, "spec_accept_rate_by_position": [1.0, 0.75, 0.25],
        "spec_num_correct_drafts": 8, "spec_num_proposed_drafts": 12,
        "spec_num_draft_positions": 12, "spec_verify_ct": 4, "spec_correct_drafts_histogram": [0, 1, 2, 1],
    }  # fmt: skip
    usage = {
        "verify_steps": 4, "drafted_tokens": 12, "accepted_tokens": 8, "accept_length": 3.0, "accept_rate": 8 / 12,
        "accept_rate_by_position": [1.0, 0.75, 0.25], "mean_depth": 3.0,
    }  # fmt: skip
    asked = {"return_cached_tokens_details": True, "return_spec_tokens_details": True}
    async with front() as f:
        for path, body in (("/v1/chat/completions", {"messages": HI}), ("/v1/completions", {"prompt": "x"})):
            whole = (await f.post(path, {**body, **asked})).json()
            assert whole["sglext"] == {"cached_tokens_details": {"device": 2, "host": 0}, "spec_tokens_details": spec}
            chunk = (await f.events(path, {**body, **asked, "stream": True}))[-2]
            assert chunk["choices"] == []
            assert chunk["sglext"] == whole["sglext"]
            live = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}, "stream": True}
            text = [one for one in await f.events(path, {**body, **asked, **live}) if one != "[DONE]" and one["choices"]]
            assert text[-1]["sglext"] == whole["sglext"]
            two = (await f.post(path, {**body, "n": 2, "return_spec_tokens_details": True})).json()
            assert two["sglext"] == {"spec_tokens_details": [spec, spec]}
            assert text[-1]["usage"]["speculative"] == whole["usage"]["speculative"] == usage
            assert two["usage"]["speculative"] == {**usage, "verify_steps": 8, "drafted_tokens": 24, "accepted_tokens": 16}
            quiet = (await f.post(path, body)).json()
            assert "sglext" not in quiet
            assert "speculative" not in quiet["usage"]
