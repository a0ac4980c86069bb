"""What the user asked for, resolved: the frozen configuration that every process receives."""

from __future__ import annotations

from typing import Literal

import msgspec

DeviceKind = Literal["cpu", "cuda"]
AttentionName = Literal["torch_native", "fa3", "flashinfer"]
SpecAlgorithm = Literal["EAGLE", "EAGLE3", "STANDALONE", "NGRAM"]


class SpeculativeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How drafts are made and verified. K = `num_steps`, D = `num_draft_tokens`.

    `synthetic_accept` fixes acceptance by position (probability that draft position i is accepted given the ones before were),
    whatever the weights say; for benchmarks with dummy weights.
    """

    algorithm: SpecAlgorithm
    draft_model_path: str | None
    draft_load_format: str
    num_steps: int
    topk: int
    num_draft_tokens: int
    token_map: str | None
    attention_backend: AttentionName
    draft_decode_graph: bool
    draft_extend_graph: bool
    accept_threshold_single: float
    accept_threshold_acc: float
    synthetic_accept: tuple[float, ...] | None
    check_parity: bool


class RuntimeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Everything decided before the first process starts. Field names are the flags' where there is one.

    `max_total_tokens` and `max_running_requests` are None where the memory plan decides.
    """

    # model
    model_path: str
    load_format: Literal["safetensors", "gguf", "dummy"]
    tokenizer_path: str
    served_model_name: str
    revision: str | None
    dtype: Literal["float32", "bfloat16", "float16"]
    quantization: Literal["int8"] | None
    context_length: int
    chat_template: str | None
    # device and memory
    device: DeviceKind
    attention_backend: AttentionName
    page_size: int
    mem_fraction_static: float | None
    max_total_tokens: int | None
    max_running_requests: int | None
    cpu_threads: int
    # graphs
    cuda_graph_bs: tuple[int, ...]
    cuda_graph_padding: bool
    # scheduling
    chunked_prefill_size: int
    max_prefill_tokens: int
    max_queued_requests: int
    schedule_policy: Literal["fcfs", "lpm"]
    schedule_conservativeness: float
    radix_cache: bool
    overlap: bool
    stream_interval: int
    random_seed: int
    watchdog_timeout: float
    # speculation
    speculative: SpeculativeConfig | None
    # server
    host: str
    port: int
    api_key: str | None
    admin_api_key: str | None
    trust_request_chat_template: bool
    enable_metrics: bool
    log_level: str
    log_requests: bool
    shutdown_timeout: float
    skip_server_warmup: bool
    profile_folder: str | None
