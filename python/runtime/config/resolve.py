"""From what the user asked for to what will run: `resolve` decides every open option, says why, and refuses what cannot take effect."""

from __future__ import annotations

import logging
import math
import secrets
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, cast

from runtime.config.attention_caps import ATTENTION_CAPS, MAX_TREE_BITS
from runtime.config.device_tuning import CPU, log_tuning
from runtime.config.machine import MachineFacts
from runtime.config.model_facts import ModelFacts
from runtime.config.runtime_config import (
    AttentionName,
    CacheConfig,
    DeviceConfig,
    DeviceKind,
    DType,
    GraphConfig,
    ParallelConfig,
    RuntimeConfig,
    SamplingName,
    SchedulerConfig,
    ServedModelConfig,
    ServerConfig,
    SpecAlgorithm,
    SpeculativeConfig,
)
from runtime.config.server_args import ServerArgs
from runtime.errors import ConfigError

log = logging.getLogger(__name__)

EMBEDDED_CPU_QUANTIZATION: Literal["int8"] | None = "int8"
"""How the embedded model runs on a CPU when neither a type nor a quantization is asked for."""
EMBEDDED_DRAFT_STEPS: dict[DeviceKind, int] = {"cpu": 3, "cuda": 4}
"""How deep the embedded model's own draft goes when nothing is asked: a chain, verified as one token more.

Measured for one request: on a CPU in int8 against depths 1, 2 and 5, on an H200 against 2, 3 and 5.
"""
EMBEDDED_DRAFT_MOST: dict[tuple[DeviceKind, str], int] = {("cpu", "int8"): 4, ("cpu", "float32"): 8}
"""With how many requests together the embedded model's own draft still pays, by device and weights; it pauses above. Elsewhere it pays at
every batch measured.

Measured with and without drafts side by side, on real text (`benchmark/results/cpu-2/embedded_speculation.json`): in int8 drafts gave 1.24
times the tokens at 2 together, 0.93 to 1.02 times at 4 and 0.81 times at 8; in float32 1.17 times at 8, the most that were measured.
"""
EMBEDDED_DRAFT = Path(__file__).parents[1] / "assets" / "smollm2-eagle3"
"""The embedded model's EAGLE-3 head."""
LEAST_CAPABILITY = (8, 0)
"""Of a GPU: older ones have no bfloat16, and neither FA3 nor FlashInfer's kernels."""
MAX_THREADS = 1024

_DTYPES: dict[str, DType] = {"float": "float32", "float32": "float32", "bfloat16": "bfloat16", "float16": "float16", "half": "float16"}
_DEFAULT_PAGE = {"torch_native": 16, "fa3": 64, "flashinfer": 16}
MAX_PAGE = 1024


def resolve(args: ServerArgs, machine: MachineFacts, model: ModelFacts, draft: tuple[str, str] | None = None) -> RuntimeConfig:
    """Decide every option that was left open and check every one that was given.

    Args:
        args: what the user asked for.
        machine: what there is to run on.
        model: what is to run.
        draft: folder of the draft model and what lies there (safetensors or dummy), if there is one.

    Raises:
        ConfigError: for an option that cannot take effect; it names the way out.
    """
    check(args)
    _check_speculation(args)
    if args.trust_remote_code:  # a permission, which may go unused: command lines for other servers carry it
        log.warning("trust remote code: not needed; code in model folders is never run")
    device = _device(args, machine)
    dtype = _dtype(args, device, model)
    backend = _attention(args.attention_backend, "--attention-backend", device, dtype, machine, model)
    context = _context_length(args, model)
    chunk = _chunk(args, device)
    running = _running_requests(args, device)
    graph_sizes = _graph_sizes(args, device, backend, running)
    quantization = _quantization(args, device, model)
    speculative = _speculative(args, device, dtype, quantization, backend, bool(graph_sizes), machine, model, draft)
    return RuntimeConfig(
        model=ServedModelConfig(
            model_path=model.path,
            load_format=model.load_format,
            tokenizer_path=model.tokenizer_path,
            served_model_name=args.served_model_name or model.name,
            revision=args.revision,
            quantization=quantization,
            context_length=context,
            chat_template=args.chat_template,
            random_seed=_seed(args),
        ),
        device=DeviceConfig(
            device=device,
            dtype=dtype,
            attention_backend=backend,
            sampling_backend=_sampling(args, device),
            cpu_threads=_threads(args, machine),
            gpu=machine.gpus[0] if device == "cuda" else None,
        ),
        cache=CacheConfig(
            page_size=_page_size(args, backend, context),
            mem_fraction_static=args.mem_fraction_static,
            max_total_tokens=args.max_total_tokens,
            radix_cache=not args.disable_radix_cache,
        ),
        scheduler=SchedulerConfig(
            max_running_requests=running,
            chunked_prefill_size=chunk,
            max_prefill_tokens=_prefill_tokens(args, device, chunk, context),
            max_queued_requests=args.max_queued_requests,
            schedule_policy=cast('Literal["fcfs", "lpm"]', args.schedule_policy),
            schedule_conservativeness=args.schedule_conservativeness,
            overlap=not args.disable_overlap_schedule,
            mixed_chunk=_mixed_chunk(args, backend, speculative),
            stream_interval=args.stream_interval,
            watchdog_timeout=args.watchdog_timeout,
        ),
        graphs=GraphConfig(cuda_graph_bs=graph_sizes, cuda_graph_padding=not args.disable_cuda_graph_padding),
        parallel=ParallelConfig(),
        speculative=speculative,
        server=ServerConfig(
            host=args.host,
            port=args.port,
            api_key=args.api_key,
            admin_api_key=args.admin_api_key,
            trust_request_chat_template=args.trust_request_chat_template,
            enable_metrics=args.enable_metrics,
            log_level=args.log_level,
            log_requests=args.log_requests,
            shutdown_timeout=args.shutdown_timeout,
            skip_server_warmup=args.skip_server_warmup,
            profile_folder=args.profile,
        ),
    )


def check(args: ServerArgs) -> None:
    """Refuse what no machine and no model could make work, before anything is fetched or loaded. Raises `ConfigError`."""
    _refuse_unsupported(args)
    _check_ranges(args)
    _check_keys(args)
    # Without a model path it is the embedded model, whose own draft `with_own_draft` fills in.
    if args.model_path is not None or args.speculative_algorithm not in (None, "EAGLE3"):
        _check_speculation(args)


def with_own_draft(args: ServerArgs, embedded: bool) -> ServerArgs:
    """`args` with the embedded model's own head, where it is that model and nobody asked for another draft or for none."""
    own = args.speculative_algorithm in (None, "EAGLE3") and args.speculative_draft_model_path is None
    if not embedded or not own:
        return args
    return replace(args, speculative_algorithm="EAGLE3", speculative_draft_model_path=str(EMBEDDED_DRAFT))


def _speculates(args: ServerArgs) -> bool:
    return args.speculative_algorithm not in (None, "none")


def _check_speculation(args: ServerArgs) -> None:
    if _speculates(args):
        _check_draft_source(args, cast(SpecAlgorithm, args.speculative_algorithm))
    else:
        _refuse_stray_speculation(args)


def default_graph_sizes(largest: int) -> tuple[int, ...]:
    """The ladder of captured batch sizes up to and including `largest`: steps of 1, 2, 4, 8 and then 16, so that padding stays small."""
    ladder = [*range(1, 9), *range(10, 33, 2), *range(36, 65, 4), *range(72, 257, 8), *range(272, largest + 16, 16)]
    return tuple(sorted({size for size in ladder if size < largest} | {largest}))


def synthetic_acceptance(text: str, num_steps: int) -> tuple[float, ...]:
    """Conditional acceptance by draft position, from a mean accept length X or from K probabilities with commas.

    X counts the bonus token, so 1 <= X <= K + 1. Every position gets the same p, where p + p^2 + ... + p^K = X - 1.

    Raises:
        ConfigError: for anything else.
    """
    flag = "--speculative-synthetic-accept-length"
    try:
        values = [float(part) for part in text.removesuffix(",").split(",")]
    except ValueError as error:
        raise ConfigError(f"{flag} is {text!r}; it must be a number, or {num_steps} probabilities with commas") from error
    if "," not in text and len(values) == 1:
        if not 1.0 <= values[0] <= num_steps + 1:
            raise ConfigError(f"{flag} is {text}; with {num_steps} steps it must be from 1 to {num_steps + 1}")
        return (_equal_acceptance(values[0] - 1.0, num_steps),) * num_steps
    if len(values) != num_steps or not all(0.0 <= value <= 1.0 for value in values):
        raise ConfigError(f"{flag} is {text!r}; with commas it must hold {num_steps} probabilities, one for each step")
    return tuple(values)


def _equal_acceptance(drafts: float, num_steps: int) -> float:
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if sum(middle**i for i in range(1, num_steps + 1)) < drafts:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _refuse_unsupported(args: ServerArgs) -> None:
    for flag, size in (("--tp-size", args.tp_size), ("--dp-size", args.dp_size), ("--ep-size", args.ep_size)):
        if size != 1:
            raise ConfigError(f"{flag} {size}: one server runs on one device; start one server for each, or leave it out")
    if args.grammar_backend not in (None, "none"):
        raise ConfigError(f"--grammar-backend {args.grammar_backend}: grammars are not supported yet; leave it out")
    if args.tool_call_parser is not None:
        raise ConfigError(f"--tool-call-parser {args.tool_call_parser}: tool calls are not supported yet; leave it out")
    if args.reasoning_parser is not None:
        raise ConfigError(f"--reasoning-parser {args.reasoning_parser}: reasoning is not parsed yet; leave it out")
    if args.sampling_backend == "flashinfer":
        raise ConfigError("--sampling-backend flashinfer: there are triton and pytorch; leave it out")


def _check_ranges(args: ServerArgs) -> None:
    if args.speculative_disable_by_batch_size == 0:
        raise ConfigError("--speculative-disable-by-batch-size 0 leaves no step with drafts; use --speculative-algorithm none")
    for name, low, high in (
        ("port", 0, 65535),
        ("max_queued_requests", 1, 1 << 20),
        ("max_total_tokens", 1, 1 << 31),
        ("max_running_requests", 1, 1 << 16),
        ("max_prefill_tokens", 1, 1 << 31),
        ("stream_interval", 1, 1 << 16),
        ("random_seed", 0, (1 << 63) - 1),
        ("cuda_graph_max_bs", 1, 4096),
        ("cpu_threads", 1, MAX_THREADS),
        ("speculative_num_steps", 1, MAX_TREE_BITS - 1),
        ("speculative_eagle_topk", 1, MAX_TREE_BITS),
        ("speculative_num_draft_tokens", 2, MAX_TREE_BITS),
        ("speculative_disable_by_batch_size", 1, 1 << 16),
    ):
        value = getattr(args, name)
        if value is not None and not low <= value <= high:
            raise ConfigError(f"{_flag_of(name)} is {value}; it must be from {low} to {high}")
    for name, limit in (("shutdown_timeout", 86400.0), ("watchdog_timeout", 86400.0), ("schedule_conservativeness", 100.0)):
        value = getattr(args, name)
        if not (math.isfinite(value) and 0.0 < value <= limit):
            raise ConfigError(f"{_flag_of(name)} is {value}; it must be above 0 and at most {limit:g}")
    if args.mem_fraction_static is not None and not 0.0 < args.mem_fraction_static < 1.0:
        raise ConfigError(f"--mem-fraction-static is {args.mem_fraction_static}; it must lie between 0 and 1")
    if args.chunked_prefill_size is not None and args.chunked_prefill_size != -1 and args.chunked_prefill_size < 16:
        raise ConfigError(f"--chunked-prefill-size is {args.chunked_prefill_size}; it must be at least 16, or -1 for no chunks")
    if args.chat_template is not None and "{" not in args.chat_template and not Path(args.chat_template).is_file():
        raise ConfigError(f"--chat-template {args.chat_template}: no such file, and no template text either")
    if args.profile is not None and (not args.profile or Path(args.profile).is_file()):
        raise ConfigError(f"--profile {args.profile!r} is no folder; name one for the traces, which is made when it is missing")


def _check_keys(args: ServerArgs) -> None:
    """A key that no header can carry would lock everybody out, and an empty one nobody."""
    for name in ("api_key", "admin_api_key"):
        key = getattr(args, name)
        if key is not None and not (key and all("!" <= letter <= "~" for letter in key)):
            what = "is empty, which would leave the server open" if not key else "has a character that no Authorization header carries"
            raise ConfigError(f"{_flag_of(name)} {what}; give printable ASCII without spaces, or leave the flag out")


def _flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def _device(args: ServerArgs, machine: MachineFacts) -> DeviceKind:
    if args.device == "cuda" and not machine.gpus:
        raise ConfigError("--device cuda: the driver shows no GPU here; use --device cpu, or check CUDA_VISIBLE_DEVICES and the driver")
    gpu = machine.gpus[0] if machine.gpus else None
    too_old = ""
    if gpu is not None and gpu.capability < LEAST_CAPABILITY:
        too_old = "{} has compute capability {}.{}, and {}.{} is the least".format(gpu.name, *gpu.capability, *LEAST_CAPABILITY)
    if args.device == "cuda" and too_old:
        raise ConfigError(f"--device cuda: {too_old}; use --device cpu")
    if args.device is not None:
        return cast(DeviceKind, args.device)
    if too_old:
        log.warning("device cpu: %s", too_old)
        return "cpu"
    if gpu is not None:
        log.info("device cuda: %s, compute capability %d.%d, %.0f GiB", gpu.name, *gpu.capability, gpu.memory / 2**30)
        log_tuning(gpu)
        return "cuda"
    log.info("device cpu: no GPU here; %d cores, %.0f GiB", machine.cores, machine.memory / 2**30)
    return "cpu"


def _dtype(args: ServerArgs, device: DeviceKind, model: ModelFacts) -> DType:
    asked = _DTYPES.get(args.dtype)
    if asked == "float16" and device == "cpu":
        raise ConfigError("--dtype float16: its range is too small for hidden states on a CPU; use bfloat16 or float32")
    if asked is None:
        asked, why = _auto_dtype(device, model)
        log.info("dtype %s: %s", asked, why)
    if args.kv_cache_dtype not in ("auto", asked):
        raise ConfigError(f"--kv-cache-dtype {args.kv_cache_dtype}: the KV cache has the model's type, {asked}; leave it out or use auto")
    return asked


def _auto_dtype(device: DeviceKind, model: ModelFacts) -> tuple[DType, str]:
    if device == "cpu":
        return "float32", "exact, and the fastest for one token on most CPUs"
    if model.dtype == "float32":
        return "bfloat16", "half the memory traffic of the checkpoint's float32"
    return model.dtype, "the checkpoint's"


def _quantization(args: ServerArgs, device: DeviceKind, model: ModelFacts) -> Literal["int8"] | None:
    if args.quantization == "int8" and device == "cuda":
        raise ConfigError("--quantization int8: built for CPUs; on CUDA leave it out, or use --device cpu")
    if args.quantization is not None:
        return "int8" if args.quantization == "int8" else None
    if not model.embedded or device != "cpu" or EMBEDDED_CPU_QUANTIZATION is None:
        return None
    default, dtype = EMBEDDED_CPU_QUANTIZATION, _DTYPES.get(args.dtype)
    if dtype is not None:
        log.info("quantization none: --dtype %s asks for %s weights; --quantization %s makes them smaller", args.dtype, dtype, default)
        return None
    log.info("quantization %s: the embedded model's default on a CPU; --dtype float32 or --quantization none turns it off", default)
    return default


def _attention(asked: str | None, flag: str, device: DeviceKind, dtype: DType, machine: MachineFacts, model: ModelFacts) -> AttentionName:
    if asked is None:
        return _auto_attention(device, dtype, machine, model)
    if asked == "torch_native":
        return "torch_native"
    if device == "cpu":
        raise ConfigError(f"{flag} {asked}: needs CUDA; on a CPU use torch_native or leave it out")
    hopper = machine.gpus[0].capability[0] == 9
    if asked == "fa3" and not hopper:
        major, minor = machine.gpus[0].capability
        raise ConfigError(f"{flag} fa3: needs a Hopper GPU (9.0), this one is {major}.{minor}; use flashinfer or torch_native")
    why_not = _package_gap(asked, machine) or _kernel_gap(asked, dtype, model)
    if why_not:
        raise ConfigError(f"{flag} {asked}: {why_not}; use torch_native")
    return cast(AttentionName, asked)


def _auto_attention(device: DeviceKind, dtype: DType, machine: MachineFacts, model: ModelFacts) -> AttentionName:
    if device == "cpu":
        return "torch_native"
    name: AttentionName = "fa3" if machine.gpus[0].capability[0] == 9 else "flashinfer"
    if missing := _package_gap(name, machine):
        log.warning("attention backend torch_native, which is much slower: %s", missing)
        return "torch_native"
    why_not = _kernel_gap(name, dtype, model)
    if why_not:
        log.info("attention backend torch_native: with %s, %s", name, why_not)
        return "torch_native"
    log.info("attention backend %s: compute capability %d.%d", name, *machine.gpus[0].capability)
    return name


def _package_gap(name: str, machine: MachineFacts) -> str:
    """What is not installed of what backend `name` needs, or an empty text."""
    package = {"fa3": "sgl_kernel", "flashinfer": "flashinfer"}[name]
    return "" if package in machine.packages else f"{name} needs the package {package}; pip install -e '.[cuda]' brings it"


def _kernel_gap(name: str, dtype: DType, model: ModelFacts) -> str:
    """Why kernels `name` cannot serve this model, or an empty text."""
    caps = ATTENTION_CAPS[name]
    if caps.dtypes is not None and dtype not in caps.dtypes:
        return f"its kernels support {' and '.join(sorted(caps.dtypes))}, not {dtype}"
    if caps.head_dims is not None and model.head_dim not in caps.head_dims:
        return f"its kernels support head dimensions {', '.join(map(str, sorted(caps.head_dims)))}, not {model.head_dim}"
    return ""


def _sampling(args: ServerArgs, device: DeviceKind) -> SamplingName:
    if args.sampling_backend == "triton" and device == "cpu":
        raise ConfigError("--sampling-backend triton: needs CUDA; on a CPU use pytorch or leave it out")
    return cast(SamplingName, args.sampling_backend or ("triton" if device == "cuda" else "pytorch"))


def _page_size(args: ServerArgs, backend: AttentionName, context: int) -> int:
    if args.page_size is None:
        return _DEFAULT_PAGE[backend]
    size = args.page_size
    if not 1 <= size <= MAX_PAGE or size & (size - 1):
        raise ConfigError(f"--page-size is {size}; it must be a power of two up to {MAX_PAGE}")
    if size > context:
        raise ConfigError(f"--page-size is {size}, above the context of {context}; choose a smaller one")
    return size


def _context_length(args: ServerArgs, model: ModelFacts) -> int:
    if args.context_length is None:
        return model.max_context_len
    if not 2 <= args.context_length <= model.max_context_len:
        raise ConfigError(f"--context-length is {args.context_length}; this model takes 2 to {model.max_context_len}")
    return args.context_length


def _chunk(args: ServerArgs, device: DeviceKind) -> int:
    if args.chunked_prefill_size == -1:
        return -1
    chunk = args.chunked_prefill_size or (CPU.chunked_prefill_size if device == "cpu" else 2048)
    if args.max_prefill_tokens is not None and args.max_prefill_tokens < chunk:
        log.info("chunked prefill %d: not more than --max-prefill-tokens", args.max_prefill_tokens)
        return args.max_prefill_tokens
    return chunk


def _prefill_tokens(args: ServerArgs, device: DeviceKind, chunk: int, context: int) -> int:
    """Enough for several chunks on a GPU, where a decode step is far shorter than a prompt; on a CPU decoding would stand for seconds.

    Where prompts are never cut, as many as were asked for, or at least the longest prompt.
    """
    if chunk == -1 and args.max_prefill_tokens is not None:
        return args.max_prefill_tokens
    longest = context if chunk == -1 else chunk
    return max(longest, args.max_prefill_tokens or (0 if device == "cpu" else 8192))


def _mixed_chunk(args: ServerArgs, backend: AttentionName, speculative: SpeculativeConfig | None) -> bool:
    """Whether running requests decode in the pass of a prompt chunk."""
    why_not = _unmixed_because(args, backend, speculative)
    if args.enable_mixed_chunk and why_not:
        raise ConfigError(f"--enable-mixed-chunk: {why_not}; leave it out")
    return args.enable_mixed_chunk


def _unmixed_because(args: ServerArgs, backend: AttentionName, speculative: SpeculativeConfig | None) -> str:
    """Why decoding cannot share a pass with prompts, or an empty text."""
    if args.chunked_prefill_size == -1:
        return "with --chunked-prefill-size -1 a prompt is never cut to make room"
    if backend == "flashinfer":
        return "flashinfer plans a prompt pass from exact lengths, which the host does not know of those who decode"
    if speculative is not None and speculative.algorithm == "NGRAM":
        return "NGRAM looks its drafts up between two steps"
    if speculative is not None and speculative.topk > 1:
        return "a draft tree has a mask, and a prompt pass is causal"
    return ""


def _running_requests(args: ServerArgs, device: DeviceKind) -> int | None:
    if args.max_running_requests is None and device == "cpu":
        return CPU.max_running_requests
    return args.max_running_requests


def _graph_sizes(args: ServerArgs, device: DeviceKind, backend: AttentionName, running: int | None) -> tuple[int, ...]:
    asked = args.cuda_graph_bs is not None or args.cuda_graph_max_bs is not None or args.disable_cuda_graph_padding
    if device == "cpu":
        if asked:
            raise ConfigError("--cuda-graph-bs, --cuda-graph-max-bs and --disable-cuda-graph-padding need CUDA; on a CPU leave them out")
        _warn_of_absent_graphs(args)
        return ()
    if backend == "torch_native":
        if asked:
            raise ConfigError(
                "--attention-backend torch_native cannot be captured; leave the --cuda-graph flags out, or use fa3 or flashinfer"
            )
        log.info("no CUDA graphs: torch_native attention cannot be captured")
        return ()
    if args.disable_cuda_graph:
        if asked:
            raise ConfigError("--disable-cuda-graph leaves no graph for the other --cuda-graph flags; leave them out")
        return ()
    if args.cuda_graph_bs is not None:
        return _given_graph_sizes(args)
    largest = args.cuda_graph_max_bs or min(256, running or 256)
    if running is not None and largest < running:
        log.warning("batches above %d run eagerly: --max-running-requests is %d", largest, running)
    return default_graph_sizes(largest)


def _warn_of_absent_graphs(args: ServerArgs) -> None:
    """Command lines for a GPU may turn off what a CPU has not; they get what they want, and no more than a word about it."""
    for name in ("disable_cuda_graph", "disable_draft_extend_cuda_graph", "disable_draft_decode_cuda_graph"):
        if getattr(args, name):
            log.warning("%s: without effect, there are no graphs on a CPU", _flag_of(name))


def _given_graph_sizes(args: ServerArgs) -> tuple[int, ...]:
    sizes = tuple(sorted(set(args.cuda_graph_bs or ())))
    if not sizes or sizes[0] < 1 or sizes[-1] > 4096:
        raise ConfigError("--cuda-graph-bs must hold batch sizes from 1 to 4096")
    if args.cuda_graph_max_bs is not None and sizes[-1] > args.cuda_graph_max_bs:
        raise ConfigError(
            f"--cuda-graph-bs goes up to {sizes[-1]}, above --cuda-graph-max-bs {args.cuda_graph_max_bs}; give one of the two"
        )
    return sizes


def _threads(args: ServerArgs, machine: MachineFacts) -> int:
    return args.cpu_threads or machine.cores


def _seed(args: ServerArgs) -> int:
    if args.random_seed is not None:
        return args.random_seed
    seed = secrets.randbelow(1 << 31)
    log.info("random seed %d: drawn for this start", seed)
    return seed


# ---- speculation


@dataclass(frozen=True)
class _DraftShape:
    num_steps: int
    topk: int
    num_draft_tokens: int


def _speculative(
    args: ServerArgs,
    device: DeviceKind,
    dtype: DType,
    quantization: str | None,
    backend: AttentionName,
    graphs: bool,
    machine: MachineFacts,
    model: ModelFacts,
    draft: tuple[str, str] | None,
) -> SpeculativeConfig | None:
    if not _speculates(args):
        return None
    algorithm = cast(SpecAlgorithm, args.speculative_algorithm)
    path, draft_format = draft or (None, model.load_format)
    shape = _draft_shape(args, device)
    most = args.speculative_disable_by_batch_size
    if path == str(EMBEDDED_DRAFT):
        most = most or EMBEDDED_DRAFT_MOST.get((device, quantization or dtype))
        log.info(
            "speculative decoding %s %d/%d/%d (steps, topk, draft tokens), %s: the embedded model's own draft; on %s the default is "
            "a chain of %d drafts; --speculative-disable-by-batch-size sets when it pauses, --speculative-algorithm none turns it off",
            *(algorithm, shape.num_steps, shape.topk, shape.num_draft_tokens),
            "at every batch" if most is None else f"paused while more than {most} requests decode together",
            *(device, EMBEDDED_DRAFT_STEPS[device]),
        )
    attention = _draft_attention(args, device, dtype, backend, machine, model)
    if graphs and attention == "torch_native" and algorithm != "NGRAM":
        log.warning("the draft runs eagerly, which is slower: torch_native attention cannot be captured")
        graphs = False
    return SpeculativeConfig(
        algorithm=algorithm,
        draft_model_path=path,
        draft_load_format=draft_format,
        num_steps=shape.num_steps,
        topk=shape.topk,
        num_draft_tokens=shape.num_draft_tokens,
        token_map=args.speculative_token_map,
        attention_backend=attention,
        draft_decode_graph=graphs and not args.disable_draft_decode_cuda_graph,
        draft_extend_graph=graphs and not args.disable_draft_extend_cuda_graph,
        disable_by_batch_size=most,
        accept_threshold_single=_threshold(args, "speculative_accept_threshold_single"),
        accept_threshold_acc=_threshold(args, "speculative_accept_threshold_acc"),
        synthetic_accept=_synthetic(args, shape),
        check_parity=args.speculative_check_parity,
    )


def _refuse_stray_speculation(args: ServerArgs) -> None:
    untouched = ServerArgs()
    for name in vars(untouched):
        about_drafts = (name.startswith("speculative_") and name != "speculative_algorithm") or name.startswith("disable_draft_")
        if about_drafts and getattr(args, name) != getattr(untouched, name):
            raise ConfigError(f"{_flag_of(name)} has no effect without --speculative-algorithm; add that, or leave it out")


def _check_draft_source(args: ServerArgs, algorithm: SpecAlgorithm) -> None:
    if algorithm == "NGRAM":
        for name in ("speculative_draft_model_path", "speculative_draft_load_format", "speculative_draft_attention_backend"):
            if getattr(args, name) is not None:
                raise ConfigError(f"{_flag_of(name)}: NGRAM guesses from the text so far and has no draft model; leave it out")
        for name in ("disable_draft_decode_cuda_graph", "disable_draft_extend_cuda_graph"):
            if getattr(args, name):
                raise ConfigError(f"{_flag_of(name)}: NGRAM has no draft model, hence no such graph; leave it out")
    elif args.speculative_draft_model_path is None:
        raise ConfigError(f"--speculative-algorithm {algorithm} needs a draft model; name it with --speculative-draft-model-path")
    if args.speculative_token_map is not None:
        if algorithm != "EAGLE":
            raise ConfigError(f"--speculative-token-map: for EAGLE only, {algorithm} drafts from its own vocabulary; leave it out")
        if not Path(args.speculative_token_map).is_file():
            raise ConfigError(
                f"--speculative-token-map {args.speculative_token_map}: no such file; it takes a file on this machine in which torch.save "
                "wrote a list or a tensor of token ids, so download one of the hub first"
            )


def _draft_shape(args: ServerArgs, device: DeviceKind) -> _DraftShape:
    topk = args.speculative_eagle_topk or 1
    asked = args.speculative_num_draft_tokens
    steps = args.speculative_num_steps or _default_steps(args, device, topk)
    if topk == 1:
        if asked is not None and asked != steps + 1:
            log.warning("speculative num draft tokens %d, not %d: a chain of %d steps verifies one token more", steps + 1, asked, steps)
        return _DraftShape(steps, 1, steps + 1)
    if args.speculative_algorithm == "NGRAM":
        raise ConfigError("--speculative-eagle-topk: NGRAM drafts a chain; leave it out")
    if args.speculative_algorithm == "STANDALONE":
        raise ConfigError("--speculative-eagle-topk: STANDALONE drafts a chain; leave it out, or use an EAGLE head for trees")
    nodes = 1 + topk + (steps - 1) * topk * topk
    if (steps - 1) * topk > MAX_TREE_BITS:
        raise ConfigError(
            f"--speculative-eagle-topk {topk} with --speculative-num-steps {steps}: "
            f"(steps - 1) * topk may be {MAX_TREE_BITS} at most; lower one"
        )
    if asked is None:
        asked = min(nodes, MAX_TREE_BITS, 2 * steps * topk)
        log.info("speculative num draft tokens %d: for %d steps with %d branches", asked, steps, topk)
    if asked > nodes:
        raise ConfigError(
            f"--speculative-num-draft-tokens {asked}: {steps} steps with {topk} branches make {nodes} nodes; ask for at most that"
        )
    return _DraftShape(steps, topk, asked)


def _default_steps(args: ServerArgs, device: DeviceKind, topk: int) -> int:
    """How deep to draft where only the width may have been asked for, which in a chain says it."""
    asked = args.speculative_num_draft_tokens
    if topk == 1 and asked is not None:
        log.info("speculative num steps %d: a chain of %d draft tokens has one step less", asked - 1, asked)
        return asked - 1
    return EMBEDDED_DRAFT_STEPS[device] if args.speculative_draft_model_path == str(EMBEDDED_DRAFT) else 3


def _draft_attention(
    args: ServerArgs, device: DeviceKind, dtype: DType, backend: AttentionName, machine: MachineFacts, model: ModelFacts
) -> AttentionName:
    asked = args.speculative_draft_attention_backend
    if asked is None or asked == backend:
        return backend
    # The draft's own head dimension is checked by its backend when it is built.
    known = replace(model, head_dim=128)
    return _attention(asked, "--speculative-draft-attention-backend", device, dtype, machine, known)


def _threshold(args: ServerArgs, name: str) -> float:
    value = getattr(args, name)
    if value is None:
        return 1.0
    if not 0.0 < value <= 1.0:
        raise ConfigError(f"{_flag_of(name)} is {value}; it must be above 0 and at most 1")
    if value < 1.0:
        log.warning("%s %g: the output no longer follows the target's distribution", _flag_of(name), value)
    return value


def _synthetic(args: ServerArgs, shape: _DraftShape) -> tuple[float, ...] | None:
    if args.speculative_synthetic_accept_length is None:
        return None
    if shape.topk != 1:
        raise ConfigError("--speculative-synthetic-accept-length works on a chain; use --speculative-eagle-topk 1")
    for name in ("speculative_accept_threshold_single", "speculative_accept_threshold_acc"):
        if (getattr(args, name) or 1.0) < 1.0:
            raise ConfigError(
                f"{_flag_of(name)}: --speculative-synthetic-accept-length alone decides what is accepted; leave one of the two out"
            )
    by_position = synthetic_acceptance(args.speculative_synthetic_accept_length, shape.num_steps)
    log.warning("synthetic acceptance: output is not the model's; for benchmarks only")
    return by_position
