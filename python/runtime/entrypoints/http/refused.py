"""The one table of request fields that this server refuses."""

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
    "only chat completions separate thinking": ("reasoning_content", "reasoning_effort"),
    "this server does not fill in the middle": ("suffix",),
    "a trace lasts from /start_profile to /stop_profile": (
        "num_steps", "profile_by_stage", "profile_stages", "start_step",
    ),
    "this server does not return these details": (
        "return_bytes", "return_entropy", "return_hidden_states", "return_indexer_topk", "return_meta_info",
        "return_prompt_token_ids", "return_routed_experts", "return_sampling_mask", "token_ids_logprob",
    ),
    "this server has no adapters": ("lora_id", "lora_path"),
    "cache_salt separates prefix caches here": ("extra_key",),
    "this server matches no regular expressions in its output": ("stop_regex",),
    "this server always takes a matched stop off the text": ("no_stop_trim",),
    "this server does prefill and decoding itself": (
        "bootstrap_host", "bootstrap_pair_key", "bootstrap_port", "bootstrap_room", "disagg_prefill_dp_rank", "kv_hints",
    ),
    "this server chooses where a request runs": ("data_parallel_rank", "routed_dp_rank"),
    "this server does not implement it yet": (
        "annotations", "custom_logit_processor", "custom_params", "include_obfuscation", "input_embeds",
        "max_thinking_tokens", "refusal", "require_reasoning", "session_params",
        "spaces_between_special_tokens", "thinking", "watermark",
    ),
}  # fmt: skip

REFUSED = {name: reason for reason, names in _NAMES_BY_REASON.items() for name in names}
"""Why each field is refused, at every level of a body; a body that declares such a field accepts it."""
TEMPLATE_REFUSED = "start the server with --trust-request-chat-template to accept templates from requests"
"""Why `chat_template` is refused by default."""

HARMLESS: dict[str, tuple[Any, ...]] = {
    "annotations": ([],),
    "data_parallel_rank": (0,),
    "function_call": ("none",),
    "functions": ([],),
    "image_data": ([], ""),
    "include_obfuscation": (False,),
    "modalities": (["text"],),
    "lora_path": ("",),
    "no_stop_trim": (False,),
    "parallel_tool_calls": (False, True),
    "reasoning_effort": ("none",),
    "profile_by_stage": (False,),
    "require_reasoning": (False,),
    "return_bytes": (False,),
    "return_entropy": (False,),
    "return_hidden_states": (False,),
    "return_indexer_topk": (False,),
    "return_meta_info": (False,),
    "return_prompt_token_ids": (False,),
    "return_routed_experts": (False,),
    "return_sampling_mask": (False,),
    "routed_dp_rank": (0,),
    "spaces_between_special_tokens": (True,),
    "stop_regex": ([], ""),
    "thinking": ({"type": "disabled"},),
    "token_ids_logprob": ([],),
    "tool_calls": ([],),
    "tool_choice": ("none",),
    "tools": ([],),
}
"""Values of refused fields that change nothing; they are accepted. So is null."""
