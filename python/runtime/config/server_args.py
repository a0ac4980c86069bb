# ruff: noqa: RUF009  (`_flag` returns a field)
"""The server's flags: `ServerArgs`. Each field is a flag, and the docstring below it is its help text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from runtime.config.attention_caps import MAX_TREE_BITS, AttentionName
from runtime.config.draft_algorithms import ALGORITHM_CAPS
from runtime.config.quant_config import FormatFlag, Quantization
from runtime.log import LogFormat
from runtime.pooling import PoolingName

MODEL, SERVER, DEVICE, SCHEDULING = "model", "server", "device and memory", "scheduling"
GRAPHS, SPECULATION, OBSERVING = "CUDA graphs", "speculative decoding", "observing"
MAX_THREADS = 1024
MAX_RANKS = 64
MAX_GRAPH_SIZE = 4096
A_DAY = (0.0, 86400.0)
"""Bounds of time-outs in seconds."""
GrammarBackendName = Literal["llguidance", "xgrammar", "none"]
FormatChoice = Literal["auto", "safetensors", "gguf", "dummy"]
ToolParserChoice = Literal[
    "auto", "hermes", "qwen25", "qwen3_coder", "llama3", "mistral", "deepseekv3", "deepseekv31", "kimi_k2", "gpt-oss", "glm47", "mimo",
    "seed_oss", "minimax-m2", "phi4_mini_json", "gemma4", "pythonic",
]  # fmt: skip
ReasoningParserChoice = Literal[
    "auto", "none", "deepseek-r1", "qwen3", "gpt-oss", "glm45", "mimo", "kimi_k2", "seed_oss", "mistral", "minimax", "gemma4",
]  # fmt: skip


def _flag(
    group: str,
    default: object,
    metavar: str | None = None,
    *aliases: str,
    bounds: tuple[int, int] | tuple[float, float] | None = None,
    names: Callable[[], tuple[str, ...]] | None = None,
) -> Any:
    """A field with its `--help` group, default, metavar, aliases and `bounds` (see `check_range`).

    `names`: the allowed values, if they are the keys of a table and not written in the type.
    """
    shown = {"group": group, "metavar": metavar, "aliases": aliases}
    return field(default=default, metadata={**shown, "bounds": bounds, "names": names})


def _algorithms() -> tuple[str, ...]:
    """The values of --speculative-algorithm."""
    return (*ALGORITHM_CAPS, "none")


@dataclass(frozen=True, kw_only=True)
class ServerArgs:
    """The flags, with SGLang's names. None means that the flag was not given.

    `runtime.config.flag_parser` builds the command line from the fields, `runtime.config.resolve` the `RuntimeConfig`.
    """

    model_path: str | None = _flag(MODEL, None, "PATH", "--model")
    """Hugging Face folder or hub id, or a .gguf file; default: the embedded SmolLM2-135M-Instruct."""
    tokenizer_path: str | None = _flag(MODEL, None, "PATH")
    """Folder or file of the tokenizer; default: the model's own."""
    served_model_name: str | None = _flag(MODEL, None, "NAME")
    """Name of the model in the API; default: the last part of the model path, or the hub id."""
    revision: str | None = _flag(MODEL, None)
    """Branch, tag or commit of a hub id."""
    download_dir: str | None = _flag(MODEL, None, "FOLDER")
    """Folder to download hub models to; default: the hub's own cache."""
    load_format: FormatChoice = _flag(MODEL, "auto")
    """Format of the weights; dummy creates random weights from only the model's config."""
    dtype: Literal["auto", "float32", "float", "bfloat16", "float16", "half"] = _flag(MODEL, "auto")
    """Type of weights and activations; auto is float32 on a CPU and the checkpoint's type, or bfloat16, on CUDA."""
    kv_cache_dtype: Literal["auto", "float32", "bfloat16", "float16", "fp8_e4m3", "fp8_e5m2"] = _flag(MODEL, "auto")
    """Type of the KV cache: the model's (auto), or fp8_e4m3, which holds twice the tokens (fa3 or torch_native attention)."""
    quantization: Literal[Quantization, FormatFlag, "none"] | None = _flag(MODEL, None)
    """fp8 stores the linear weights of all layers in 8 bits (e4m3, a scale for each 128 x 128 entries), int4 in 4 (a scale and a minimum
    or zero point for each 32 columns), and on a CPU int8 in 8; int4 on a CPU and int8 store the LM head in 8 bits; none turns off the
    embedded model's default. A quantized checkpoint needs no flag: mxfp4, awq and gptq only check that it is in this format."""
    disable_fp8_activations: bool = _flag(MODEL, False)
    """Keep 16-bit activations with FP8 weights; by default, prompts and experts with many tokens round them to 8 bits on a GPU."""
    disable_shared_experts_fusion: bool = _flag(MODEL, False)
    """Run the shared expert of a sparse model with separate GEMMs; by default, passes with few tokens run it as one of the stacked
    experts if it has the same shape and format."""
    context_length: int | None = _flag(MODEL, None, "TOKENS")
    """Maximum tokens of prompt and output together; default: the model's."""
    chat_template: str | None = _flag(MODEL, None, "TEMPLATE")
    """Jinja chat template, a file or the text itself; default: the model's own."""
    sampling_defaults: Literal["model", "openai"] = _flag(MODEL, "model")
    """Defaults for sampling fields missing from OpenAI requests: the model's generation_config.json, or OpenAI's (temperature 1)."""
    preferred_sampling_params: str | None = _flag(MODEL, None, "JSON")
    """Defaults for sampling fields missing from any request, such as '{"temperature": 0.7}'; overrides --sampling-defaults."""
    trust_remote_code: bool = _flag(MODEL, False)
    """Accepted without effect: code in model folders never runs."""

    host: str = _flag(SERVER, "127.0.0.1")
    """Address to listen on; 0.0.0.0 opens the server to the network."""
    port: int = _flag(SERVER, 30000, bounds=(0, 65535))
    """TCP port to listen on; 0 picks a free one."""
    uds: str | None = _flag(SERVER, None, "PATH")
    """Unix socket to listen on instead of a TCP port."""
    ssl_keyfile: str | None = _flag(SERVER, None, "PATH")
    """Private key for HTTPS, in PEM format; needs --ssl-certfile."""
    ssl_certfile: str | None = _flag(SERVER, None, "PATH")
    """Certificate chain for HTTPS, in PEM format; needs --ssl-keyfile."""
    ssl_keyfile_password: str | None = _flag(SERVER, None, "PASSWORD")
    """Password of the private key."""
    api_key: str | None = _flag(SERVER, None, "KEY")
    """Key that every request must send as 'Authorization: Bearer KEY'; default: the environment variable TALON_API_KEY."""
    api_key_file: str | None = _flag(SERVER, None, "PATH")
    """File with one key, or YAML with several, their names and limits; SIGHUP reloads it."""
    admin_api_key: str | None = _flag(SERVER, None, "KEY")
    """Key for administrative endpoints (flush, profile, abort); default: the API key."""
    protect_metrics: bool = _flag(SERVER, False)
    """Require the key for /metrics and /health_generate too; without this flag they are open to probes."""
    allow_origins: str | None = _flag(SERVER, None, "ORIGINS")
    """Origins whose web pages may use the API, separated by commas, such as https://app.example; * allows all."""
    allowed_hosts: str | None = _flag(SERVER, None, "HOSTS")
    """Public host names by which clients without a key reach the server, separated by commas; * allows all."""
    max_queued_requests: int = _flag(SERVER, 4096, "N", bounds=(1, 1 << 20))
    """Maximum number of waiting requests; further requests get status 429."""
    max_queued_tokens: int | None = _flag(SERVER, None, "TOKENS", bounds=(1, 1 << 40))
    """Maximum prompt tokens that may wait, or that one call may send; default: 524288 on a CPU, 8388608 on CUDA."""
    max_body_mib: int = _flag(SERVER, 8, "MIB", bounds=(1, 1 << 10))
    """Largest request body; larger bodies get status 413."""
    max_parse_ms: int = _flag(SERVER, 50, "MS", bounds=(1, 1 << 20))
    """Largest estimated time to parse a body, which blocks other requests; larger bodies get status 413."""
    max_logprob_cells: int | None = _flag(SERVER, None, "N", bounds=(1, 1 << 40))
    """Maximum number of log-probabilities in all answers of one call; default: 128 times the context length."""
    queue_timeout: float | None = _flag(SERVER, None, "SECONDS", bounds=A_DAY)
    """Seconds that a request may wait for its first step before it gets status 503; default: no limit."""
    request_timeout: float | None = _flag(SERVER, None, "SECONDS", bounds=A_DAY)
    """Seconds that a request may take in total before it ends with status 504; default: no limit."""
    max_priority: int = _flag(SERVER, 0, "N", bounds=(-(1 << 63), (1 << 63) - 1))
    """Caps `priority` when comparing requests of different clients; requests of one client are compared uncapped."""
    trust_request_chat_template: bool = _flag(SERVER, False)
    """Allow requests to include their own chat template (it runs in a sandbox)."""
    strict_request_fields: bool = _flag(SERVER, False)
    """Refuse requests with unknown fields; by default unknown fields are ignored and named in a response header."""
    tool_call_parser: ToolParserChoice = _flag(SERVER, "auto")
    """Format of the model's tool calls; auto picks it by architecture and chat template."""
    reasoning_parser: ReasoningParserChoice = _flag(SERVER, "auto")
    """Format of the model's reasoning; auto picks it by architecture and chat template, none leaves reasoning in the text."""
    embedding_pooling: PoolingName = _flag(SERVER, "mean")
    """How /v1/embeddings reduces a prompt: to the mean of its hidden states, or to the state of its last token."""
    skip_server_warmup: bool = _flag(SERVER, False)
    """Report ready without running a warm-up request."""
    shutdown_timeout: float = _flag(SERVER, 30.0, "SECONDS", bounds=A_DAY)
    """Seconds that open requests may take after SIGTERM."""
    watchdog_timeout: float = _flag(SERVER, 300.0, "SECONDS", bounds=A_DAY)
    """Seconds that one scheduler step may take before the server counts as hung and exits."""

    device: Literal["cpu", "cuda"] | None = _flag(DEVICE, None)
    """Device that runs the model; default: cuda if there is a GPU, else cpu."""
    attention_backend: AttentionName | None = _flag(DEVICE, None)
    """Attention kernels; default: fa3 on Hopper GPUs, flashinfer on other GPUs, torch_native on a CPU."""
    sampling_backend: Literal["triton", "pytorch", "flashinfer"] | None = _flag(DEVICE, None)
    """Sampling kernels; default: triton on a GPU, pytorch on a CPU; flashinfer is not supported."""
    grammar_backend: GrammarBackendName = _flag(DEVICE, "llguidance")
    """Library that compiles JSON schemas and other grammars; none refuses requests with a grammar."""
    mem_fraction_static: float | None = _flag(DEVICE, None, "SHARE")
    """Fraction of device memory for weights and KV cache; default: all that is left after activations and graphs."""
    max_total_tokens: int | None = _flag(DEVICE, None, "TOKENS", bounds=(1, 1 << 31))
    """KV slots; default: as many as fit."""
    max_running_requests: int | None = _flag(DEVICE, None, "N", bounds=(1, 1 << 16))
    """Requests that run together; default: the largest captured batch, or 16 without graphs."""
    page_size: int | None = _flag(DEVICE, None, "SLOTS")
    """KV slots per page; default: 64 with fa3 (128 for contexts of 16,384 tokens and more, if the head dimension is 128), else 16."""
    tp_size: int = _flag(DEVICE, 1, "N", "--tensor-parallel-size", "--tp", bounds=(1, MAX_RANKS))
    """Tensor-parallel size: the number of GPUs, or CPU processes, that share one model."""
    nnodes: int = _flag(DEVICE, 1, "N", bounds=(1, MAX_RANKS))
    """Hosts that share one model, each with the same number of its ranks; start the same command on all of them."""
    node_rank: int = _flag(DEVICE, 0, "I")
    """Number of this host, from 0; node 0 serves HTTP, the others run until it exits."""
    dist_init_addr: str | None = _flag(DEVICE, None, "HOST:PORT", "--nccl-init-addr")
    """Rendezvous address on node 0, for IPv6 [HOST]:PORT; use a private network, because nothing is encrypted."""
    dist_timeout: float = _flag(DEVICE, 600.0, "SECONDS", bounds=A_DAY)
    """Seconds that the ranks wait for each other at start-up."""
    distributed_executor_backend: Literal["mp", "ray"] = _flag(DEVICE, "mp")
    """How ranks are started: by the server on each node (mp), or as Ray actors from node 0 (needs talon-runtime[ray])."""
    dp_size: int = _flag(DEVICE, 1, "N", "--data-parallel-size", "--dp")
    """Attention groups of --enable-dp-attention, a divisor of --tp-size; for whole copies of a model, start several servers."""
    enable_dp_attention: bool = _flag(DEVICE, False)
    """Give each of --dp-size groups of ranks its own attention and the KV cache of its own requests; all ranks share the experts."""
    ep_size: int = _flag(DEVICE, 1, "N", "--expert-parallel-size", "--ep")
    """Expert-parallel size: the number of rank groups over which experts are distributed, a divisor of --tp-size."""
    disable_custom_all_reduce: bool = _flag(DEVICE, False)
    """Exchange data between GPUs by NCCL alone, not by our own kernels, which are checked and timed at start-up."""
    cpu_threads: int | None = _flag(DEVICE, None, "N", bounds=(1, MAX_THREADS))
    """Threads per CPU operation; default: OMP_NUM_THREADS, or the number of cores, divided among the ranks of a sharded model."""

    chunked_prefill_size: int | None = _flag(SCHEDULING, None, "TOKENS")
    """Prompt tokens per step; longer prompts run in chunks, -1 disables chunking; default: 512 on a CPU, 2048 on CUDA, and
    while many prompt tokens wait 4096, or 8192 with a sparse model."""
    max_prefill_tokens: int | None = _flag(SCHEDULING, None, "TOKENS", bounds=(1, 1 << 31))
    """Maximum prompt tokens, over all requests, that run before a decode step; default: one chunk on a CPU, 8192 on CUDA."""
    enable_mixed_chunk: bool = _flag(SCHEDULING, False)
    """Run decoding requests in the same pass as prompt chunks; output stalls less, TTFT increases."""
    schedule_policy: Literal["fcfs", "lpm"] = _flag(SCHEDULING, "fcfs")
    """Queue order: first come first served, or longest prefix match."""
    schedule_conservativeness: float = _flag(SCHEDULING, 1.0, "FACTOR", bounds=(0.0, 100.0))
    """A larger factor admits requests later and causes fewer retractions."""
    max_mamba_cache_size: int | None = _flag(SCHEDULING, None, "STATES", bounds=(0, 1 << 20))
    """Recurrent states kept for cached prefixes, if the model has such states; by default a fifth of the free memory, on a CPU of 4 GiB."""
    disable_radix_cache: bool = _flag(SCHEDULING, False)
    """Never reuse the KV cache of earlier prompts."""
    disable_overlap_schedule: bool = _flag(SCHEDULING, False)
    """Prepare a step only after the previous one has ended."""
    stream_interval: int = _flag(SCHEDULING, 1, "TOKENS", bounds=(1, 1 << 16))
    """Tokens per chunk of a stream."""
    random_seed: int | None = _flag(SCHEDULING, None, "SEED", bounds=(0, (1 << 63) - 1))
    """Seed for requests without one; default: drawn at start and logged."""

    disable_cuda_graph: bool = _flag(GRAPHS, False)
    """Run every step eagerly."""
    disable_cuda_graph_padding: bool = _flag(GRAPHS, False)
    """Replay a graph only for exactly the batch size it was captured for."""
    enable_iteration_graph: bool = _flag(GRAPHS, False)
    """Capture draft decode, verify and draft extend as one graph where possible; default: for up to 4B active parameters on one GPU."""
    disable_iteration_graph: bool = _flag(GRAPHS, False)
    """Capture draft decode, verify and draft extend as separate graphs for every model."""
    disable_head_bounds: bool = _flag(GRAPHS, False)
    """Find greedy tokens by all 16-bit weights of the LM head. Otherwise a GPU of the Hopper generation has a copy of the LM head in int8,
    half its size, whose scores bound those of the 16-bit weights, for batches where that is faster."""
    cuda_graph_max_bs: int | None = _flag(GRAPHS, None, "N", "--cuda-graph-max-bs-decode", bounds=(1, MAX_GRAPH_SIZE))
    """Largest captured batch size; default: 256, or --max-running-requests if that is smaller."""
    cuda_graph_bs: tuple[int, ...] | None = _flag(GRAPHS, None, "N", "--cuda-graph-bs-decode")
    """Batch sizes to capture; default: increasing steps up to the largest."""

    speculative_algorithm: str | None = _flag(SPECULATION, None, None, "--speculative-algo", names=_algorithms)
    """How tokens are drafted; EAGLE without a draft model is MTP, the layer in the checkpoint itself. The embedded model drafts
    with its own head unless this is none."""
    speculative_draft_model_path: str | None = _flag(SPECULATION, None, "PATH", "--speculative-draft-model")
    """Folder or hub id of the draft model."""
    speculative_draft_model_quantization: Literal["unquant", "fp8"] | None = _flag(SPECULATION, None)
    """fp8 quantizes the layers of a 16-bit draft model; default: as stored in its checkpoint, on a CPU in int8 if --quantization is int8
    or int4."""
    speculative_draft_load_format: FormatChoice | None = _flag(SPECULATION, None)
    """Format of the draft model's weights; default: dummy with a dummy model unless it is a GGUF file, else auto."""
    speculative_draft_tp_size: int | None = _flag(SPECULATION, None, "N")
    """Tensor-parallel size of the draft: 1 (replicated) or the target's; default: the one estimated to be faster."""
    speculative_num_steps: int | Literal["auto"] | None = _flag(SPECULATION, None, "K", bounds=(1, MAX_TREE_BITS - 1))
    """Draft depth K; auto: each iteration runs at the depth, 0 to 7, with the most expected tokens per second. Default: auto for
    chains; D - 1 if D is given; all masked tokens of a DFLASH block; 3 for trees and for the embedded model."""
    speculative_eagle_topk: int | None = _flag(SPECULATION, None, "N", bounds=(1, MAX_TREE_BITS))
    """Branches per draft node; default: 1, a chain."""
    speculative_num_draft_tokens: int | None = _flag(SPECULATION, None, "D", bounds=(2, MAX_TREE_BITS))
    """Tokens per request in a verify pass, including the root; a chain has K + 1."""
    speculative_disable_by_batch_size: int | None = _flag(SPECULATION, None, "N", bounds=(1, 1 << 16))
    """Do not draft in steps of more than N requests; default: no limit, or as measured for the embedded model on a CPU."""
    speculative_tuning: str | None = _flag(SPECULATION, None, "PATH")
    """File, written by `python -m runtime.tune`, with the draft shape and the best depth by batch size; other flags override it."""
    speculative_token_map: str | None = _flag(SPECULATION, None, "PATH")
    """File, written by torch.save or `python -m runtime.hot_tokens`, with the token ids that an EAGLE or MTP draft may propose."""
    speculative_accept_threshold_single: float | None = _flag(SPECULATION, None, "P", bounds=(0.0, 1.0))
    """Accept draft tokens with at least this target probability; below 1 the output distribution changes."""
    speculative_accept_threshold_acc: float | None = _flag(SPECULATION, None, "P", bounds=(0.0, 1.0))
    """Scale of the accumulated acceptance probability; below 1 the output distribution changes."""
    speculative_draft_attention_backend: AttentionName | None = _flag(SPECULATION, None)
    """Attention kernels of the draft model; default: the target's."""
    disable_draft_extend_cuda_graph: bool = _flag(SPECULATION, False)
    """Run draft extend eagerly."""
    disable_draft_decode_cuda_graph: bool = _flag(SPECULATION, False)
    """Run draft decode eagerly."""
    disable_draft_head_candidates: bool = _flag(SPECULATION, False)
    """Score all tokens with the 16-bit weights of a draft's LM head; by default a copy in 8 bits selects the tokens to score on a GPU of
    the Hopper generation, if that is faster."""
    speculative_synthetic_accept_length: str | None = _flag(SPECULATION, None, "X")
    """For benchmarks: accept X tokens per step on average; if the depth is auto, X is that of three drafts, and each draft is as likely to
    be accepted at other depths. With commas, one acceptance probability per position."""
    speculative_check_parity: bool = _flag(SPECULATION, False)
    """Before serving, run prompts eagerly and with every graph; exit if acceptance or text differs."""

    log_level: Literal["debug", "info", "warning", "error"] = _flag(OBSERVING, "info")
    """Lowest level to log."""
    log_level_http: Literal["debug", "info", "warning", "error"] | None = _flag(OBSERVING, None)
    """Lowest level to log in the HTTP server; default: --log-level."""
    log_requests: bool = _flag(OBSERVING, False)
    """Log every HTTP request, and the lengths and times of each generation, but never its text."""
    log_slow_requests: float | None = _flag(OBSERVING, None, "SECONDS", bounds=A_DAY)
    """Log generations that take at least this long, with their slowest phase: queue, prefill or decode."""
    log_format: LogFormat = _flag(OBSERVING, "text")
    """Log format: text, or one JSON object per line with the request id."""
    otlp_traces_endpoint: str | None = _flag(OBSERVING, None, "URL")
    """OpenTelemetry collector that gets a trace of every request, by OTLP over HTTP, such as http://localhost:4318."""
    enable_metrics: bool = _flag(OBSERVING, True)
    """Serve Prometheus metrics at /metrics; on unless set to false."""
    profile: str | None = _flag(OBSERVING, None, "FOLDER")
    """Folder for traces from /start_profile."""
