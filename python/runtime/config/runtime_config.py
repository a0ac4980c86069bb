"""The resolved configuration: `RuntimeConfig`, with one frozen struct per component."""

from __future__ import annotations

from typing import Any, Literal, TypeVar

import msgspec

from runtime.config.attention_caps import AttentionName
from runtime.config.device_tuning import DeviceTuning, tuning_of
from runtime.config.draft_algorithms import SpecAlgorithm, tokens_per_step
from runtime.config.machine import Gpu
from runtime.config.quant_config import Quantization
from runtime.config.server_args import GrammarBackendName
from runtime.config.speculative_tuning import SpeculativeTuning
from runtime.log import LogFormat
from runtime.pooling import PoolingName
from runtime.sampling_params import NO_DEFAULTS, SamplingDefaults

DeviceKind = Literal["cpu", "cuda"]
DType = Literal["float32", "bfloat16", "float16"]
SamplingName = Literal["triton", "pytorch"]
KVDType = Literal["auto", "fp8_e4m3"]
Executor = Literal["mp", "ray"]
LoadFormat = Literal["safetensors", "gguf", "dummy"]
Part = TypeVar("Part", bound=msgspec.Struct)


def part_of_flags(part: type[Part], args: object, **decided: Any) -> Part:
    """A part of the configuration: the `decided` fields, and for the other fields the flags of the same names in `args`."""
    return part(**{name: getattr(args, name) for name in part.__struct_fields__ if name not in decided}, **decided)


class ServedModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The served model, and how its weights are stored.

    Requests may name the model by its served name or one of `aliases`. `random_seed` seeds dummy weights and requests without a seed.
    Missing sampling fields have the values of `default_sampling_params` in OpenAI's endpoints and of `preferred_sampling_params` in
    SGLang's native ones. `fuse_shared_experts`: whether the shared expert of a sparse model is stacked with the routed ones if possible.
    """

    model_path: str
    load_format: LoadFormat
    tokenizer_path: str
    served_model_name: str
    revision: str | None
    quantization: Quantization | None
    context_length: int
    chat_template: str | None
    random_seed: int
    aliases: tuple[str, ...] = ()
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    sampling_defaults: Literal["model", "openai"] = "model"
    default_sampling_params: SamplingDefaults = NO_DEFAULTS
    preferred_sampling_params: SamplingDefaults = NO_DEFAULTS
    fuse_shared_experts: bool = True


class DeviceConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Device, dtype and kernels. `gpu` is None on a CPU. `kv_cache_dtype` "auto" is `dtype`."""

    device: DeviceKind
    dtype: DType
    attention_backend: AttentionName
    sampling_backend: SamplingName
    cpu_threads: int
    gpu: Gpu | None = None
    kv_cache_dtype: KVDType = "auto"
    fp8_activations: bool = True

    @property
    def tuning(self) -> DeviceTuning:
        """The device's measured constants."""
        tuning = tuning_of(self.gpu)
        return tuning if self.fp8_activations else tuning.without_fp8_activations()


class CacheConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The KV cache, and the recurrent states of cached prefixes. `max_total_tokens` and `max_mamba_cache_size` are None if the memory plan
    decides.
    """

    page_size: int
    mem_fraction_static: float | None
    max_total_tokens: int | None
    radix_cache: bool
    max_mamba_cache_size: int | None = None


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The scheduler's options.

    `max_running_requests` is None if the largest graph decides. `chunked_prefill_size` is -1 if prompts are never split. While many prompt
    tokens wait, chunks have `largest_chunk_size`, if it is given. Sizes are in tokens, time-outs in seconds.
    """

    max_running_requests: int | None
    chunked_prefill_size: int
    max_prefill_tokens: int
    max_queued_requests: int
    max_queued_tokens: int
    max_priority: int
    queue_timeout: float | None
    request_timeout: float | None
    schedule_policy: Literal["fcfs", "lpm"]
    schedule_conservativeness: float
    overlap: bool
    mixed_chunk: bool
    stream_interval: int
    watchdog_timeout: float
    grammar_backend: GrammarBackendName = "llguidance"
    largest_chunk_size: int | None = None


class GraphConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The batch sizes to capture (if empty, all steps run eagerly), whether smaller batches are padded to them, whether bounds by a copy of
    the LM head in int8 may find greedy tokens, and whether iteration graphs are used if possible; None: if the model is small.
    """

    cuda_graph_bs: tuple[int, ...]
    cuda_graph_padding: bool
    head_bounds: bool = False
    iteration_graph: bool | None = False


class ParallelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The ranks of tensor, data and expert parallelism, and the nodes that have them.

    Each of `dp_size` attention groups of consecutive ranks serves its own requests; it is 1 unless `enable_dp_attention`. Node `node_rank`
    of `nnodes` has `tp_size / nnodes` consecutive ranks. Node 0 listens at `dist_init_addr`, HOST:PORT. `dist_timeout`: seconds that ranks
    wait for each other at start-up. `executor`: what starts the ranks, each node's server ("mp") or Ray. `disable_custom_all_reduce`:
    whether GPUs exchange data by NCCL alone.
    """

    tp_size: int = 1
    dp_size: int = 1
    enable_dp_attention: bool = False
    ep_size: int = 1
    nnodes: int = 1
    node_rank: int = 0
    dist_init_addr: str | None = None
    dist_timeout: float = 600.0
    executor: Executor = "mp"
    disable_custom_all_reduce: bool = False

    @property
    def ranks_per_node(self) -> int:
        """Ranks on each node."""
        return self.tp_size // self.nnodes

    @property
    def own_ranks(self) -> range:
        """The ranks of this node."""
        return range(self.node_rank * self.ranks_per_node, (self.node_rank + 1) * self.ranks_per_node)

    def visible_devices(self, rank: int, given: str | None) -> str:
        """CUDA_VISIBLE_DEVICES of a rank: its own GPU first, so that it is number 0 everywhere, then the GPUs of the other ranks.

        `given`: the server's CUDA_VISIBLE_DEVICES, or None.
        """
        devices = (given.split(",") if given else list(map(str, range(self.ranks_per_node))))[: self.ranks_per_node]
        own = rank % self.ranks_per_node
        return ",".join([devices[own], *devices[:own], *devices[own + 1 :]])


class SpeculativeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How drafts are made and verified. K = `num_steps`, D = `num_draft_tokens`.

    `synthetic_accept` is the conditional acceptance of each draft position; it replaces acceptance by the models, for benchmarks with dummy
    weights. Steps of more than `disable_by_batch_size` requests run without drafts. With `depths`, a controller chooses one of them for
    each iteration, and `num_steps` is the deepest; without them the depth is fixed. `draft_tp_size` is 1, the number of ranks that share
    the target, or None: by the size of the draft's blocks. `tuning`: the tuning file that determined the shape. `draft_candidates`: whether
    an 8-bit copy of the draft's LM head may select the tokens that greedy drafts are chosen from.
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
    disable_by_batch_size: int | None
    accept_threshold_single: float
    accept_threshold_acc: float
    synthetic_accept: tuple[float, ...] | None
    check_parity: bool
    draft_quantization: Literal["fp8"] | None = None
    depths: tuple[int, ...] = ()
    draft_tp_size: int | None = None
    draft_candidates: bool = False
    tuning: SpeculativeTuning | None = None

    @property
    def tokens_per_step(self) -> int:
        """KV positions beyond the committed length that one iteration may write."""
        return tokens_per_step(self.num_steps, self.topk, self.num_draft_tokens)


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The HTTP server and its logs. `shutdown_timeout` is in seconds."""

    host: str
    port: int
    api_key: str | None
    admin_api_key: str | None
    max_body_mib: int
    max_parse_ms: int
    max_logprob_cells: int
    trust_request_chat_template: bool
    embedding_pooling: PoolingName
    enable_metrics: bool
    log_level: str
    log_requests: bool
    shutdown_timeout: float
    skip_server_warmup: bool
    profile_folder: str | None
    uds: str | None = None
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None
    ssl_keyfile_password: str | None = None
    api_key_file: str | None = None
    log_level_http: str | None = None
    log_format: LogFormat = "text"
    log_slow_requests: float | None = None
    otlp_traces_endpoint: str | None = None
    strict_request_fields: bool = False
    protect_metrics: bool = False
    allow_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()


class RuntimeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Every decision made before the first process starts. Fields have the names of their flags if there is one."""

    model: ServedModelConfig
    device: DeviceConfig
    cache: CacheConfig
    scheduler: SchedulerConfig
    graphs: GraphConfig
    parallel: ParallelConfig
    speculative: SpeculativeConfig | None
    server: ServerConfig

    @property
    def weights(self) -> str:
        """The type of the stored linear weights, such as "int8" or "bfloat16"."""
        return self.model.quantization or self.device.dtype

    def by_flag(self) -> dict[str, object]:
        """All options by field name, without their parts, in JSON types; drafting stays nested under `speculative`."""
        parts = msgspec.to_builtins(self)
        speculative = parts.pop("speculative")
        return {name: value for part in parts.values() for name, value in part.items()} | {"speculative": speculative}
