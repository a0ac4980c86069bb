"""The one table of request fields that this server refuses."""

from __future__ import annotations

from typing import Any

_NAMES_BY_REASON = {
    "this server reads and writes text only, and opens no URL and no file": (
        "audio", "audio_data", "image_data", "modalities", "video_data", "web_search_options",
    ),
    "this server does not call tools yet": (
        "function_call", "functions", "parallel_tool_calls", "tool_call_id", "tool_calls", "tool_choice",
        "tools",
    ),
    "this server does not fill in the middle": ("suffix",),
    "the server takes a profile in its own way, in the folder of --profile": (
        "activities", "num_steps", "output_dir", "profile_by_stage", "record_shapes", "start_step", "with_stack",
    ),
    "this server does not implement it yet": (
        "annotations", "custom_logit_processor", "custom_params", "include_obfuscation", "input_embeds",
        "lora_path", "no_stop_trim", "reasoning_content", "reasoning_effort", "refusal", "return_hidden_states",
        "return_routed_experts", "session_params", "spaces_between_special_tokens", "stop_regex",
        "token_ids_logprob",
    ),
}  # fmt: skip

REFUSED = {name: reason for reason, names in _NAMES_BY_REASON.items() for name in names}
"""Why each field is refused, at every level of a body; a body that declares such a field accepts it."""
TEMPLATE_REFUSED = "start the server with --trust-request-chat-template to accept templates from requests"
"""Why `chat_template` is refused by default."""

HARMLESS: dict[str, tuple[Any, ...]] = {
    "annotations": ([],),
    "functions": ([],),
    "image_data": ([], ""),
    "include_obfuscation": (False,),
    "modalities": (["text"],),
    "no_stop_trim": (False,),
    "return_hidden_states": (False,),
    "return_routed_experts": (False,),
    "spaces_between_special_tokens": (True,),
    "tool_calls": ([],),
    "tool_choice": ("none",),
    "tools": ([],),
}
"""Values of refused fields that change nothing; they are accepted. So is null."""
