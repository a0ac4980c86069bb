"""The one table of request fields of other servers: those that this server refuses, and those that change nothing here."""

from __future__ import annotations

from typing import Any

_NAMES_BY_REASON = {
    "this server reads and writes text only, and opens no URL and no file": (
        "audio", "audio_data", "image_data", "modalities", "video_data", "web_search_options",
    ),
    "only chat completions take tools": (
        "function_call", "functions", "parallel_tool_calls", "tool_call_id", "tool_calls", "tool_choice",
        "tools",
    ),
    "only /generate and /v1/completions take token ids": ("input_ids",),
    "the whole conversation counts; truncation of /v1/responses shortens one": ("context_management", "truncate_prompt_tokens"),
    "write documents and instructions into the messages or the prompt": ("documents", "instruct", "task"),
    "only /v1/completions repeats the prompt or takes the best of several": ("best_of", "echo"),
    "this server does not search with beams": ("beam_width", "length_penalty", "use_beam_search"),
    "white space between the parts of JSON is free, up to 32 characters": (
        "disable_any_whitespace", "guided_whitespace_pattern", "whitespace_pattern",
    ),
    "logit_bias, regex and json_schema say which tokens may come": ("allowed_token_ids", "bad_words", "logits_processors"),
    "return_token_ids returns the token ids": ("return_input_ids_in_sglext", "return_output_ids_in_sglext", "return_prompt_token_ids"),
    "embeddings of a prompt cannot be given": (
        "embed_override_token_id", "embed_overrides", "input_embeds", "item_embed_overrides", "positional_embed_overrides",
        "query_embed_overrides",
    ),
    "labels are scored after the whole prompt": (
        "multi_item_delimiter_indices", "score_extraction_token", "token_indices_to_pool",
    ),
    "this server does not moderate what it reads and writes": ("moderation",),
    "only chat completions separate thinking": ("reasoning_content", "reasoning_effort"),
    "this server does not fill in the middle": ("suffix",),
    "a trace lasts from /start_profile to /stop_profile": (
        "num_steps", "profile_by_stage", "profile_stages", "start_step",
    ),
    "this server does not return these details": (
        "return_bytes", "return_entropy", "return_hidden_states", "return_indexer_topk", "return_meta_info",
        "prompt_logprobs", "return_flat_raw_output_top_logprobs", "return_flat_raw_top_logprobs", "return_pooled_hidden_states",
        "return_routed_experts", "return_sampling_mask", "return_token_logprobs", "sampling_logprobs_mode", "token_ids_logprob",
    ),
    "this server has no adapters": ("lora_id", "lora_path"),
    "cache_salt separates prefix caches here": ("extra_key",),
    "this server matches no regular expressions in its output": ("stop_regex",),
    "this server always takes a matched stop off the text": ("include_stop_str_in_output", "no_stop_trim"),
    "this server does prefill and decoding itself": (
        "bootstrap_host", "bootstrap_pair_key", "bootstrap_port", "bootstrap_room", "disagg_prefill_dp_rank", "kv_hints",
    ),
    "this server chooses where a request runs": ("data_parallel_rank", "routed_dp_rank"),
    "this server does not implement it yet": (
        "annotations", "custom_logit_processor", "custom_params", "ebnf_full_assistant", "include_obfuscation",
        "max_thinking_tokens", "refusal", "repetition_detection", "require_reasoning", "session_params",
        "spaces_between_special_tokens", "thinking", "thinking_token_budget", "watermark",
    ),
}  # fmt: skip

REFUSED = {name: reason for reason, names in _NAMES_BY_REASON.items() for name in names}
"""Why each field is refused, at every level of a body; a body that declares such a field accepts it."""

_NAMES_BY_HARMLESS: tuple[tuple[tuple[Any, ...], tuple[str, ...]], ...] = (
    ((False,), (
        "disable_any_whitespace", "ebnf_full_assistant", "echo", "include_obfuscation", "include_stop_str_in_output", "no_stop_trim",
        "profile_by_stage", "require_reasoning", "return_bytes", "return_entropy", "return_flat_raw_output_top_logprobs",
        "return_flat_raw_top_logprobs", "return_hidden_states", "return_indexer_topk", "return_input_ids_in_sglext", "return_meta_info",
        "return_output_ids_in_sglext", "return_pooled_hidden_states", "return_prompt_token_ids", "return_routed_experts",
        "return_sampling_mask", "return_token_logprobs", "use_beam_search",
    )),
    (([],), (
        "allowed_token_ids", "annotations", "bad_words", "context_management", "documents", "functions", "token_ids_logprob",
        "tool_calls", "tools",
    )),
    ((1,), ("beam_width", "best_of", "length_penalty")),
    ((0,), ("data_parallel_rank", "routed_dp_rank")),
    (("none",), ("function_call", "reasoning_effort")),
    (([], ""), ("image_data", "stop_regex")),
    (("",), ("lora_path", "suffix")),
    ((["text"],), ("modalities",)),
    ((False, True), ("parallel_tool_calls",)),
    ((True,), ("spaces_between_special_tokens",)),
    (({"type": "disabled"},), ("thinking",)),
    (("auto", "none"), ("tool_choice",)),
)  # fmt: skip

HARMLESS = {name: values for values, names in _NAMES_BY_HARMLESS for name in names}
"""Values of refused fields that change nothing; they are accepted. So is null."""

NO_EFFECT = frozenset({
    "background", "background_options", "cache_control", "conversation_id", "custom_labels", "decode_tp_size", "encoder_urls",
    "external_trace_header", "http_worker_ipc", "image_max_dynamic_patch", "images_config", "log_metrics", "max_dynamic_patch", "metadata",
    "min_dynamic_patch", "mm_content_hashes", "mm_hashes", "mm_processor_kwargs", "need_wait_for_mm_inputs", "no_logs",
    "num_items_assigned", "prediction", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "received_time",
    "return_flat_raw_top_logprobs_b64", "routed_experts_start_len", "routing_key", "safety_identifier", "separate_reasoning",
    "service_tier", "session_id", "store", "stream_interval", "stream_reasoning", "use_audio_in_video", "user", "verbosity",
    "video_config", "video_max_dynamic_patch",
})  # fmt: skip
"""Fields that cannot change an answer of this server, at every level of a body: they say how to read images, route, trace or report."""


def changes_nothing(name: str, value: object) -> bool:
    """Whether a value of a refused field is harmless; SGLang's clients also send a list with one value per prompt."""
    harmless = HARMLESS.get(name, ())
    if isinstance(value, list) and value and all(one is None or one in harmless for one in value):
        return True
    return value is None or value in harmless
