"""Measured constants per GPU: costs for scheduling and graphs, and the kernels' default configurations. No torch."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from dataclasses import dataclass

from runtime.config.expert_tuning import H100_EXPERTS, H200_EXPERTS, LITTLE_SHARED_EXPERTS, ExpertTuning
from runtime.config.kernel_configs import ClusterConfig, FragmentConfig, LatentConfig, SplitConfig, TritonConfig
from runtime.config.machine import Gpu

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CpuTuning:
    """Defaults of a machine without a GPU.

    Attributes:
        max_running_requests: requests that run together.
        chunked_prefill_size: prompt tokens of one step.
        kv_share: maximum fraction of the free memory for the KV cache.
        kv_bytes: maximum bytes of the KV cache.
        group_headroom: bytes that the memory plan leaves for requests if a cgroup limits memory.
        saturating_tokens: prompt tokens below which a pass takes longer per token, because it is bound by reading (and
            widening) the weights.
    """

    max_running_requests: int = 16
    chunked_prefill_size: int = 512
    kv_share: float = 0.25
    kv_bytes: int = 4 << 30
    group_headroom: int = 128 << 20
    saturating_tokens: int = 256


CPU = CpuTuning()


Candidates = tuple[TritonConfig, ...]
"""Configurations of the Triton GEMM that are worth timing against cuBLAS, the most promising first."""
FragmentCandidates = tuple[FragmentConfig, ...]


@dataclass(frozen=True, slots=True)
class DeviceTuning:
    """Measured constants of one GPU.

    Attributes:
        launch_seconds: time per kernel of a pass that is launched kernel by kernel.
        gemm_flops: FLOP/s of a prompt's GEMMs with 16-bit weights.
        weight_read_tokens: tokens for which GEMMs take as long as reading the weights once, at two bytes per parameter.
        graph_node_bytes: device memory of one kernel node of an instantiated graph.
        nccl_node_bytes: device memory of one NCCL call in an instantiated graph.
        split_kv_batches: ranges of batch sizes, first and last, whose fixed-width passes run split-KV attention instead of FA3.
        split_kv_width: maximum queries per request of such a pass.
        split_kv_queries: passes with more queries per request also run split-KV attention if they have at most this many in total.
        whole_kv_programs: (maximum queries per request, requests times KV heads), ascending: so do passes with at least this many requests
            times KV heads.
        split_kv: (largest batch, configuration for head dimensions up to 128), ascending; the last applies to any batch.
        wide_split_kv: configuration for head dimensions above 256 and any batch.
        latent: (maximum queries times heads of a request, configuration of split-KV attention over latent rows), ascending; the last
            applies to any number.
        gemm_candidates: by operation, (largest number of input rows, candidates), ascending.
        scaled_candidates: the same for e4m3 weights, for every operation.
        int4_candidates: the same for int4 weights.
        head_candidates: the same for a draft's LM head in e4m3 and rows in e4m3.
        fragment_candidates: (largest number of input rows, configurations) of the fragment GEMM, ascending.
        int4_fragment_candidates: the same with int4 weights.
        triton_gemm_rows: up to this many rows, a GEMM that was not timed uses the first candidate, above it cuBLAS; and the WGMMA GEMM is
            not timed for `logits`.
        wgmma_only_rows: above this many rows, Triton's candidates are not timed if the WGMMA GEMM supports the weights.
        num_sms: SMs of the measured GPU.
        clusters_at_once: number of clusters that run concurrently, one block per SM, by blocks per cluster.
        sum_bytes: bytes that the GPU reads in the time of an all-reduce of a block's output by our own kernel.
        nccl_sum_bytes: the same for an all-reduce by NCCL.
        experts: the tilings of sparse MLPs.
        fp8_activations: whether prompts round activations to e4m3 with e4m3 weights.
    """

    launch_seconds: float
    gemm_flops: float
    weight_read_tokens: int
    graph_node_bytes: int
    nccl_node_bytes: int
    split_kv_batches: tuple[tuple[int, int], ...]
    split_kv_width: int
    split_kv_queries: int
    whole_kv_programs: tuple[tuple[int, int], ...]
    split_kv: tuple[tuple[int, SplitConfig], ...]
    wide_split_kv: SplitConfig
    latent: tuple[tuple[int, LatentConfig], ...]
    gemm_candidates: Mapping[str, tuple[tuple[int, Candidates], ...]]
    scaled_candidates: tuple[tuple[int, Candidates], ...]
    int4_candidates: tuple[tuple[int, Candidates], ...]
    head_candidates: tuple[tuple[int, Candidates], ...]
    fragment_candidates: tuple[tuple[int, FragmentCandidates], ...]
    int4_fragment_candidates: tuple[tuple[int, FragmentCandidates], ...]
    triton_gemm_rows: int
    wgmma_only_rows: int
    num_sms: int
    clusters_at_once: Mapping[int, int]
    sum_bytes: float
    nccl_sum_bytes: float
    experts: ExpertTuning
    fp8_activations: bool = True

    def without_fp8_activations(self) -> DeviceTuning:
        """The same, with 16-bit activations in every pass."""
        return dataclasses.replace(self, experts=self.experts.without_fp8_rows(), fp8_activations=False)

    def split_wins(self, batch: int, width: int, num_kv_heads: int) -> bool:
        """Whether passes of `width` queries for each of `batch` requests run split-KV attention."""
        if any(width <= most and batch * num_kv_heads >= least for most, least in self.whole_kv_programs):
            return True
        if width > self.split_kv_width:
            return batch * width <= self.split_kv_queries
        return any(first <= batch <= last for first, last in self.split_kv_batches)

    def split_config(self, head_dim: int, batch: int) -> SplitConfig:
        """The configuration of split-KV attention for a head dimension and a batch size; with half tiles above a head dimension of 128."""
        config = next((config for largest, config in self.split_kv if batch <= largest), self.split_kv[-1][1])
        if head_dim > 256:
            return self.wide_split_kv
        return config if head_dim <= 128 else dataclasses.replace(config, tile=config.tile // 2)

    def latent_config(self, rows: int) -> LatentConfig:
        """The split-KV configuration over latent rows for `rows` queries times heads."""
        return next((config for largest, config in self.latent if rows <= largest), self.latent[-1][1])

    def gemm_configs(self, op: str, rows: int) -> Candidates:
        """The candidates of `linear`, `linear_add`, `gate_up` or `logits` for `rows` rows of input, 1..128."""
        return next(configs for max_rows, configs in self.gemm_candidates[op] if rows <= max_rows)

    def scaled_configs(self, rows: int) -> Candidates:
        """The candidates for e4m3 weights and `rows` rows of input, 1..128."""
        return next(configs for max_rows, configs in self.scaled_candidates if rows <= max_rows)

    def int4_configs(self, rows: int) -> Candidates:
        """The candidates for int4 weights and `rows` rows of input, 1..128."""
        return next(configs for max_rows, configs in self.int4_candidates if rows <= max_rows)

    def candidate_configs(self, rows: int) -> Candidates:
        """The candidates for a draft's LM head in e4m3 and `rows` rows of e4m3 input, 1..128."""
        return next(configs for max_rows, configs in self.head_candidates if rows <= max_rows)

    def fragment_configs(self, rows: int) -> FragmentCandidates:
        """The configurations of the fragment GEMM for `rows` rows of input; none for many rows."""
        return next((configs for max_rows, configs in self.fragment_candidates if rows <= max_rows), ())

    def int4_fragment_configs(self, rows: int) -> FragmentCandidates:
        """The same with int4 weights."""
        return next((configs for max_rows, configs in self.int4_fragment_candidates if rows <= max_rows), ())


_DEEP = TritonConfig(64, 128, 4, 6, swap=True, prefetch=0), TritonConfig(32, 256, 4, 4, swap=True, prefetch=512)
_FLAT = TritonConfig(32, 128, 4, 4, prefetch=0), TritonConfig(64, 64, 4, 6, swap=True, prefetch=0)
_WIDEST = TritonConfig(256, 64, 8, 4, swap=True, prefetch=0)
_SHALLOW = TritonConfig(128, 64, 8, 4, swap=True, prefetch=0)
_WIDE = TritonConfig(128, 128, 4, 4, swap=True, prefetch=0)
_HALF_UP = TritonConfig(64, 128, 4, 4, swap=True, prefetch=0)
_HALF_LOGITS = TritonConfig(64, 128, 4, 5, swap=True, prefetch=0)
_CLUSTER = ClusterConfig(warps=8, stages=2, largest=16)

H200 = DeviceTuning(
    # A decode step launched kernel by kernel takes 70 µs per kernel; a prompt step has more work around the pass.
    launch_seconds=80e-6,
    # Prompts of an 8B model in bfloat16.
    gemm_flops=6e14,
    weight_read_tokens=128,
    # CUDA 13: 52 graphs of 300 nodes took 88 MiB.
    graph_node_bytes=5800,
    # On two H100s 51 graphs of 96 calls took 551 MiB more than by their nodes.
    nccl_node_bytes=120_000,
    # Up to 1.5 times as fast as FA3 with one request, 10 to 25 % faster up to 16. With 32 and 48 requests, 1.5 times as fast with 200 keys
    # per request and 1.1 times with 1,500; up to 12 % slower where lengths differ by a factor of seven.
    split_kv_batches=((1, 16), (25, 32), (41, 48)),
    split_kv_width=4,
    # Windows of 8 and 16: up to a fifth faster than FA3 with up to 64 queries and 1,000 keys, as fast with 4,000; with 128
    # queries FA3 is a quarter faster.
    split_kv_queries=64,
    # 64 to 128 requests with 8 KV heads, one and eight queries each: 1.2 to 1.5 times as fast as FA3 with 200 keys per request, 1.01 to 1.1
    # times with 1,500, 4 % slower to 1 % faster with 4,000, and never slower by more than 1 % where lengths differ by a factor of seven.
    whole_kv_programs=((4, 384), (8, 512)),
    # A tile of 64 keys and values is at most 32 KiB, so two or three programs share an SM. With few requests one program per SM has less to
    # merge, and its tiles may be twice as long. For 17 to 48 requests a schedule balances the programs; more requests have one program per
    # KV head. Three programs per SM are faster only if nearly as many run: where fewer start, some SMs get three and others one. Up to
    # eight requests, one launch less matters: the blocks of a cluster merge their results, in the largest clusters that all run
    # concurrently.
    split_kv=(
        (4, SplitConfig(128, num_warps=4, stages=3, programs_per_sm=1, alone=2, cluster=_CLUSTER)),
        (8, SplitConfig(64, num_warps=4, stages=4, programs_per_sm=2, cluster=_CLUSTER)),
        (16, SplitConfig(64, num_warps=4, stages=3, programs_per_sm=3)),
        (32, SplitConfig(64, num_warps=4, stages=4, programs_per_sm=2, scheduled=True)),
        (48, SplitConfig(64, num_warps=4, stages=3, programs_per_sm=3, scheduled=True)),
        (1 << 16, SplitConfig(64, num_warps=4, stages=4, programs_per_sm=2, whole=True)),
    ),
    # A tile of keys and values is 64 KiB.
    wide_split_kv=SplitConfig(32, num_warps=8, stages=3, programs_per_sm=1, max_partial_rows=1024),
    # The largest tiles that fit registers and shared memory without spills.
    latent=(
        (32, LatentConfig(32, 32, num_warps=8, stages=2)),
        (1 << 16, LatentConfig(64, 64, num_warps=8, stages=2)),
    ),
    # The fastest of a sweep over Llama-3-8B's GEMMs. Long prefetches slow the chain of kernels where a GEMM is large;
    # where it is small, the first columns are worth it. Deeper tiles do not fit beside 64 rows of input.
    gemm_candidates={
        "linear": (
            (8, (TritonConfig(16, 256, 2, 6, swap=True, prefetch=512), TritonConfig(16, 256, 2, 4, swap=True, prefetch=0))),
            (32, (TritonConfig(64, 128, 4, 6, swap=True, prefetch=0), TritonConfig(64, 256, 4, 4, swap=True, prefetch=0))),
            (64, _DEEP),
            (128, _FLAT),
        ),
        "linear_add": (
            (16, (TritonConfig(16, 256, 2, 6, prefetch=512), TritonConfig(16, 256, 2, 6, swap=True, prefetch=512))),
            (32, (TritonConfig(32, 512, 4, 3, swap=True, prefetch=512), TritonConfig(32, 256, 4, 5, swap=True, tma=True, prefetch=0))),
            (64, _DEEP),
            (128, _FLAT),
        ),
        "gate_up": (
            (8, (TritonConfig(64, 256, 4, 3, prefetch=0), TritonConfig(64, 256, 4, 3, tma=True, late=True, prefetch=0))),
            (16, (_HALF_UP, _WIDE)),
            (32, (_WIDE, _HALF_UP)),
            (64, (_WIDE, _HALF_UP, _SHALLOW)),
            (128, (_WIDEST, _SHALLOW)),
        ),
        "logits": (
            (8, (TritonConfig(32, 128, 2, 6, prefetch=0), TritonConfig(64, 256, 4, 4, swap=True, tma=True, prefetch=0))),
            (16, (_HALF_LOGITS, _WIDE)),
            (32, (_WIDE, _HALF_LOGITS)),
            (64, (_WIDE, _HALF_LOGITS, _SHALLOW)),
            (128, (_WIDEST, _SHALLOW)),
        ),
    },
    # Tiles of as many bytes as those in 16 bits. The FP8 models of docs/benchmarks/model_matrix.md run with what start-up chose of them.
    scaled_candidates=(
        (
            16,
            (
                TritonConfig(16, 512, 2, 5, swap=True, prefetch=512),
                TritonConfig(16, 256, 2, 6, swap=True, prefetch=512),
                TritonConfig(32, 512, 4, 4, swap=True, prefetch=0),
                TritonConfig(64, 256, 4, 4, swap=True, prefetch=0),
            ),
        ),
        (
            32,
            (
                TritonConfig(64, 256, 4, 4, swap=True, prefetch=0),
                TritonConfig(32, 256, 4, 4, swap=True, prefetch=0),
                TritonConfig(64, 128, 4, 6, swap=True, prefetch=0),
            ),
        ),
        (64, (TritonConfig(64, 128, 4, 5, swap=True, prefetch=0), TritonConfig(64, 128, 8, 5, swap=True, prefetch=0))),
        (128, (TritonConfig(64, 128, 8, 4, swap=True, prefetch=0), TritonConfig(64, 128, 4, 4, swap=True, prefetch=0))),
    ),
    # The fastest of a sweep over two of Llama-3-8B's GEMMs on an H200, which itself runs other kernels.
    int4_candidates=(
        (16, (TritonConfig(64, 128, 4, 3, swap=True, prefetch=0), TritonConfig(32, 128, 4, 3, swap=True, prefetch=0))),
        (64, (TritonConfig(128, 128, 8, 3, swap=True, prefetch=0), TritonConfig(64, 128, 4, 3, swap=True, prefetch=0))),
        (128, (TritonConfig(64, 128, 4, 4, swap=True, prefetch=0), TritonConfig(128, 64, 8, 3, swap=True, prefetch=0))),
    ),
    # The fastest of a sweep over 128256 x 4096 and 151936 x 2048.
    head_candidates=(
        (16, (TritonConfig(128, 256, 4, 3, swap=True, prefetch=0), TritonConfig(128, 256, 8, 3, swap=True, tma=True, prefetch=0))),
        (64, (TritonConfig(128, 128, 4, 4, swap=True, prefetch=0), TritonConfig(256, 128, 8, 4, swap=True, prefetch=0))),
        (
            128,
            (TritonConfig(256, 128, 8, 4, swap=True, tma=True, prefetch=0), TritonConfig(256, 64, 8, 6, swap=True, tma=True, prefetch=0)),
        ),
    ),
    # Warps that hold a block's weights of 2048 or 4096 columns in registers at once, by the compiler's register counts; for 16 rows
    # also half of them.
    fragment_candidates=(
        (8, (FragmentConfig(8, 4), FragmentConfig(16, 4), FragmentConfig(4, 4))),
        (16, (FragmentConfig(8, 4), FragmentConfig(8, 2), FragmentConfig(16, 2), FragmentConfig(8, 2, tall=2))),
    ),
    # The fastest of a sweep over Llama-3-8B's GEMMs.
    int4_fragment_candidates=(
        (8, (FragmentConfig(8, 2), FragmentConfig(4, 2), FragmentConfig(4, 2, tall=2), FragmentConfig(8, 2, tall=2))),
        (16, (FragmentConfig(8, 1, tall=2), FragmentConfig(8, 2, tall=2), FragmentConfig(4, 2, tall=2))),
    ),
    triton_gemm_rows=32,
    wgmma_only_rows=64,
    num_sms=132,
    clusters_at_once={1: 132, 2: 66, 3: 39, 4: 30, 6: 17, 8: 15},
    # 2.8 us at 4.3 TB/s; by NCCL 10 us and more.
    sum_bytes=12e6,
    nccl_sum_bytes=45e6,
    experts=H200_EXPERTS,
)

_LISTED = {"H200": H200}
_FLOPS_PER_SM = {(8, 0): 0.5, (9, 0): 1.0, (10, 0): 2.0, (10, 3): 2.0}
"""Tensor-core FLOP per clock and SM in 16 bits, relative to Hopper; 0.25 for other capabilities (consumer GPUs)."""
_LARGE_SHARED = {(9, 0), (10, 0), (10, 3)}
"""Compute capabilities with 227 KiB of shared memory per block; others have 99 to 163 KiB."""
_H100_BANDWIDTH = 4e12
"""Bytes per second below which a Hopper GPU's memory is that of an H100, not of an H200."""


def tuning_of(gpu: Gpu | None) -> DeviceTuning:
    """The constants of this GPU: measured if it is listed, else estimated from its SMs and memory bandwidth.

    Without a GPU they are the H200's, which only tests read then.
    """
    if gpu is None:
        return H200
    listed = next((tuning for name, tuning in _LISTED.items() if name in gpu.name.split()), None)
    return listed or _estimate(gpu)


def log_tuning(gpu: Gpu) -> None:
    """Log whether the constants are measured or estimated for this GPU."""
    tuning = tuning_of(gpu)
    if tuning in _LISTED.values():
        log.info("device tuning: measured values of this GPU")
    else:
        log.info(
            "device tuning: %s is not listed; estimated %.0f TFLOP/s and %d tokens per weight read from %d SMs and %.2f TB/s; "
            "kernel defaults are those of an H200",
            *(gpu.name, tuning.gemm_flops / 1e12, tuning.weight_read_tokens, gpu.num_sms, gpu.bandwidth / 1e12),
        )


def _estimate(gpu: Gpu) -> DeviceTuning:
    if not gpu.num_sms or not gpu.bandwidth:
        return H200
    flops = H200.gemm_flops * gpu.num_sms / H200.num_sms * _FLOPS_PER_SM.get(gpu.capability, 0.25)
    if gpu.capability not in _LARGE_SHARED:
        experts = LITTLE_SHARED_EXPERTS
    elif gpu.capability == (9, 0) and gpu.bandwidth < _H100_BANDWIDTH:
        experts = H100_EXPERTS
    else:
        experts = H200_EXPERTS
    # The tiles for more rows need 152 KiB of shared memory before Hopper, and 345 KiB after it.
    latent = H200.latent if gpu.capability == (9, 0) else H200.latent[:1]
    # 2 FLOP per parameter and token, 2 bytes per parameter.
    read_tokens = max(16, round(flops / gpu.bandwidth / 16) * 16)
    return dataclasses.replace(H200, gemm_flops=flops, weight_read_tokens=read_tokens, latent=latent, experts=experts)
