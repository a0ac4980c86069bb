"""What the user asked for: `ServerArgs`, whose fields are the flags."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Flag:
    """How a field of `ServerArgs` is asked for: its group in `--help`, one sentence, allowed values, other spellings."""

    group: str
    help: str
    choices: tuple[str, ...] | None = None
    metavar: str | None = None
    aliases: tuple[str, ...] = ()


def _flag(
    default: object,
    group: str,
    help: str,
    *,
    choices: tuple[str, ...] | None = None,
    metavar: str | None = None,
    aliases: tuple[str, ...] = (),
) -> Any:  # the declared type of the field stands beside it
    return field(default=default, metadata={"flag": Flag(group, help, choices, metavar, aliases)})


@dataclass(frozen=True, kw_only=True)
class ServerArgs:
    """What the user asked for: one field is one flag, spelled as SGLang spells it. None (or False) means "not asked".

    `runtime.config.flag_parser` makes the command line of it, `runtime.config.resolve` the `RuntimeConfig`.
    """

    model_path: str | None = _flag(
        None,
        "model",
        "Hugging Face folder or hub id, or a .gguf file; without it the embedded SmolLM2-135M-Instruct is served.",
        metavar="PATH",
        aliases=("--model",),
    )
    tokenizer_path: str | None = _flag(None, "model", "Folder or file of the tokenizer, if it is not the model's own.", metavar="PATH")
    served_model_name: str | None = _flag(
        None, "model", "Name of the model in the API; default: the model path's last part or hub id.", metavar="NAME"
    )
    revision: str | None = _flag(None, "model", "Branch, tag or commit of a hub id.")
    load_format: str = _flag(
        "auto",
        "model",
        "Where weights come from; dummy makes random ones from a config alone.",
        choices=("auto", "safetensors", "gguf", "dummy"),
    )
    dtype: str = _flag(
        "auto",
        "model",
        "Type of weights and activations; auto is float32 on a CPU and the checkpoint's type, or bfloat16, on CUDA.",
        choices=("auto", "float32", "float", "bfloat16", "float16", "half"),
    )
    kv_cache_dtype: str = _flag(
        "auto",
        "model",
        "Type of the KV cache; only that of the model (auto) is built.",
        choices=("auto", "float32", "bfloat16", "float16", "fp8_e4m3", "fp8_e5m2"),
    )
    quantization: str | None = _flag(
        None,
        "model",
        "int8 keeps linear weights in 8 bits (CPU); none, as an explicit --dtype, turns off the embedded model's default.",
        choices=("int8", "none"),
    )
    context_length: int | None = _flag(None, "model", "Most tokens of prompt and output together; default: the model's.", metavar="TOKENS")
    chat_template: str | None = _flag(
        None, "model", "Jinja chat template, a file or the text itself, in place of the model's own.", metavar="TEMPLATE"
    )
    trust_remote_code: bool = _flag(False, "model", "Taken and not needed: code in model folders is never run.")

    host: str = _flag("127.0.0.1", "server", "Address to listen at; 0.0.0.0 opens the server to the network.")
    port: int = _flag(30000, "server", "TCP port to listen at; 0 takes a free one.")
    api_key: str | None = _flag(None, "server", "Key that every request must send as 'Authorization: Bearer KEY'.", metavar="KEY")
    admin_api_key: str | None = _flag(
        None, "server", "Key for administrative endpoints (flush, profile, abort); default: the API key.", metavar="KEY"
    )
    max_queued_requests: int = _flag(4096, "server", "Requests that may wait; more are answered with 429.", metavar="N")
    trust_request_chat_template: bool = _flag(False, "server", "Let requests bring their own chat template (it runs in a sandbox).")
    tool_call_parser: str | None = _flag(None, "server", "Refused: tool calls are not supported yet.", metavar="NAME")
    reasoning_parser: str | None = _flag(None, "server", "Refused: reasoning is not parsed yet; it stays in the text.", metavar="NAME")
    skip_server_warmup: bool = _flag(False, "server", "Say ready without generating a first token.")
    shutdown_timeout: float = _flag(30.0, "server", "Seconds that open requests get after SIGTERM.", metavar="SECONDS")
    watchdog_timeout: float = _flag(
        300.0, "server", "Seconds one scheduler step may take before the server counts as hung and exits.", metavar="SECONDS"
    )

    device: str | None = _flag(
        None, "device and memory", "Where the model runs; default: cuda where there is a GPU, else cpu.", choices=("cpu", "cuda")
    )
    attention_backend: str | None = _flag(
        None,
        "device and memory",
        "Attention kernels; default: fa3 on Hopper GPUs, flashinfer on other GPUs, torch_native on a CPU.",
        choices=("torch_native", "fa3", "flashinfer"),
    )
    sampling_backend: str | None = _flag(
        None,
        "device and memory",
        "Sampling kernels; default: triton on a GPU, pytorch on a CPU. flashinfer is refused.",
        choices=("triton", "pytorch", "flashinfer"),
    )
    grammar_backend: str | None = _flag(None, "device and memory", "Refused: grammars are not supported yet.", metavar="NAME")
    mem_fraction_static: float | None = _flag(
        None,
        "device and memory",
        "Share of device memory for weights and KV cache; default: what is left after everything else was measured.",
        metavar="SHARE",
    )
    max_total_tokens: int | None = _flag(None, "device and memory", "KV slots; default: as many as fit.", metavar="TOKENS")
    max_running_requests: int | None = _flag(
        None, "device and memory", "Requests that run together; default: those of the largest CUDA graph, 16 without graphs.", metavar="N"
    )
    page_size: int | None = _flag(None, "device and memory", "KV slots allocated together; default: 64 with fa3, else 16.", metavar="SLOTS")
    tp_size: int = _flag(
        1, "device and memory", "GPUs that share one model; only 1.", metavar="N", aliases=("--tensor-parallel-size", "--tp")
    )
    dp_size: int = _flag(1, "device and memory", "Copies of the model; only 1.", metavar="N", aliases=("--data-parallel-size", "--dp"))
    ep_size: int = _flag(
        1, "device and memory", "GPUs that share the experts; only 1.", metavar="N", aliases=("--expert-parallel-size", "--ep")
    )
    cpu_threads: int | None = _flag(None, "device and memory", "Threads of one CPU operation; default: the cores there are.", metavar="N")

    chunked_prefill_size: int | None = _flag(
        None,
        "scheduling",
        "Prompt tokens of one step, longer prompts go in pieces; default: 512 on a CPU, 2048 on CUDA; -1: never cut.",
        metavar="TOKENS",
    )
    max_prefill_tokens: int | None = _flag(
        None,
        "scheduling",
        "Prompt tokens, over all requests, that run before those who decode get a step; default: the chunk on a CPU, 8192 on CUDA.",
        metavar="TOKENS",
    )
    enable_mixed_chunk: bool = _flag(
        False,
        "scheduling",
        "Let running requests decode in the passes of prompts: their tokens go on, and first tokens come a little later.",
    )
    schedule_policy: str = _flag("fcfs", "scheduling", "Who runs next: first come, or longest cached prefix.", choices=("fcfs", "lpm"))
    schedule_conservativeness: float = _flag(1.0, "scheduling", "Higher admits later and retracts less.", metavar="FACTOR")
    disable_radix_cache: bool = _flag(False, "scheduling", "Never reuse the KV of an earlier prompt.")
    disable_overlap_schedule: bool = _flag(False, "scheduling", "Prepare a step only when the one before has ended.")
    stream_interval: int = _flag(1, "scheduling", "Tokens between two chunks of a stream.", metavar="TOKENS")
    random_seed: int | None = _flag(
        None, "scheduling", "Seed for requests without one; default: drawn at start and logged.", metavar="SEED"
    )

    disable_cuda_graph: bool = _flag(False, "CUDA graphs", "Run every step eagerly.")
    disable_cuda_graph_padding: bool = _flag(False, "CUDA graphs", "Replay a graph only for exactly the batch size it was captured for.")
    cuda_graph_max_bs: int | None = _flag(
        None, "CUDA graphs", "Largest captured batch; default: 256, or --max-running-requests where fewer.", metavar="N"
    )
    cuda_graph_bs: tuple[int, ...] | None = _flag(
        None, "CUDA graphs", "Batch sizes to capture, in place of the default ladder.", metavar="N"
    )

    speculative_algorithm: str | None = _flag(
        None,
        "speculative decoding",
        "How drafts are made; the embedded model has a draft of its own and uses it unless this is none.",
        choices=("EAGLE", "EAGLE3", "STANDALONE", "NGRAM", "none"),
    )
    speculative_draft_model_path: str | None = _flag(
        None, "speculative decoding", "Folder or hub id of the draft model.", metavar="PATH", aliases=("--speculative-draft-model",)
    )
    speculative_draft_load_format: str | None = _flag(
        None,
        "speculative decoding",
        "As --load-format, for the draft; default: dummy with a dummy model unless it is a GGUF file, else auto.",
        choices=("auto", "safetensors", "gguf", "dummy"),
    )
    speculative_num_steps: int | None = _flag(
        None,
        "speculative decoding",
        "Tokens that the draft goes deep, K; default: D - 1 of a chain whose D was asked for, else 3 (embedded: 4 on a GPU).",
        metavar="K",
    )
    speculative_eagle_topk: int | None = _flag(
        None, "speculative decoding", "Branches of each draft node; default 1, a chain.", metavar="N"
    )
    speculative_num_draft_tokens: int | None = _flag(
        None, "speculative decoding", "Tokens verified at once, the root included; a chain has K + 1.", metavar="D"
    )
    speculative_disable_by_batch_size: int | None = _flag(
        None,
        "speculative decoding",
        "Decode steps of more than N requests run without drafts; default: never, or what was measured for the embedded model on a CPU.",
        metavar="N",
    )
    speculative_token_map: str | None = _flag(
        None, "speculative decoding", "File, written by torch.save, with the token ids that an EAGLE draft may guess.", metavar="PATH"
    )
    speculative_accept_threshold_single: float | None = _flag(
        None,
        "speculative decoding",
        "Accept a draft token of at least this target probability; below 1 the output's distribution changes.",
        metavar="P",
    )
    speculative_accept_threshold_acc: float | None = _flag(
        None, "speculative decoding", "Scale of accumulated acceptance; below 1 the output's distribution changes.", metavar="P"
    )
    speculative_draft_attention_backend: str | None = _flag(
        None,
        "speculative decoding",
        "Attention kernels of the draft; default: the target's.",
        choices=("torch_native", "fa3", "flashinfer"),
    )
    disable_draft_extend_cuda_graph: bool = _flag(False, "speculative decoding", "Run the draft's extend pass eagerly.")
    disable_draft_decode_cuda_graph: bool = _flag(False, "speculative decoding", "Run the draft's decode passes eagerly.")
    speculative_synthetic_accept_length: str | None = _flag(
        None,
        "speculative decoding",
        "For benchmarks: accept this many tokens a step on average, or, with commas, with these probabilities by position.",
        metavar="X",
    )
    speculative_check_parity: bool = _flag(
        False,
        "speculative decoding",
        "Before serving, run a few prompts eagerly and through every graph, and do not start where acceptance or text differs.",
    )

    log_level: str = _flag("info", "observing", "Least serious record to log.", choices=("debug", "info", "warning", "error"))
    log_requests: bool = _flag(False, "observing", "Log each request's lengths and times, never its text.")
    enable_metrics: bool = _flag(True, "observing", "Serve Prometheus metrics at /metrics; on unless set to false.")
    profile: str | None = _flag(None, "observing", "Folder for traces of /start_profile.", metavar="FOLDER")
