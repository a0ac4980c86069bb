"""The configurations of hand-written kernels, such as tilings: plain data, without torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TritonConfig:
    """The tiling of the Triton GEMM: tiles of `block_n` weight rows by `block_k` columns, `stages` of them in flight.

    Attributes:
        swap: the weight tile is the tensor cores' left operand and x the right one, which then needs no padding to 16 rows.
        tma: tiles are loaded by TMA descriptors (Hopper) instead of the threads' own loads.
        prefetch: columns of each weight row that are prefetched into L2 while the previous kernel is still running.
        late: the launch of the next kernel is triggered at the end of the main loop instead of its beginning.
    """

    block_n: int
    block_k: int
    num_warps: int
    stages: int
    swap: bool = False
    tma: bool = False
    prefetch: int = 1024
    late: bool = False

    def parts(self, weight_rows: int) -> int:
        """How many partial sums of squares a GEMM with `weight_rows` rows of weights writes per row of output."""
        return -(-weight_rows // self.block_n)

    def __str__(self) -> str:
        marks = f"{' swap' if self.swap else ''}{' tma' if self.tma else ''}{' late' if self.late else ''}"
        return f"{self.block_n}x{self.block_k} warps {self.num_warps} stages {self.stages}{marks} prefetch {self.prefetch}"


@dataclass(frozen=True, slots=True)
class FragmentConfig:
    """The tiling of the fragment GEMM: blocks of `tall` times 16 weight rows, whose columns are split over `warps` warps.

    Attributes:
        batch: loads in flight per lane, for each of its two rows.
    """

    warps: int
    batch: int
    tall: int = 1

    def parts(self, weight_rows: int) -> int:
        """How many partial sums of squares a GEMM with `weight_rows` rows of weights writes per row of output."""
        return -(-weight_rows // (16 * self.tall))

    def __str__(self) -> str:
        return f"fragments {16 * self.tall} warps {self.warps} batch {self.batch}"


@dataclass(frozen=True, slots=True)
class ResidentConfig:
    """The tiling of the resident GEMM: blocks of 16 weight rows, whose columns are split over `warps` warps.

    Attributes:
        depth: stages of 64 columns that each warp holds at once.
        blocks: blocks per SM.
    """

    warps: int
    depth: int
    blocks: int

    def parts(self, weight_rows: int) -> int:
        """How many partial sums of squares a GEMM with `weight_rows` rows of weights writes per row of output."""
        return weight_rows // 16

    def __str__(self) -> str:
        return f"resident warps {self.warps} depth {self.depth}"


@dataclass(frozen=True, slots=True)
class FullyResidentConfig:
    """The tiling of the fully resident GEMM: one block per SM of up to `tall` times 16 weight rows, whose columns `warps` warps split.

    Attributes:
        share: stages of 128 columns of each warp for 16 rows.
    """

    warps: int
    share: int
    tall: int

    def parts(self, weight_rows: int) -> int:
        """How many partial sums of squares a GEMM with `weight_rows` rows of weights writes per row of output."""
        return weight_rows // 16

    def __str__(self) -> str:
        return f"fully resident {16 * self.tall} warps {self.warps} share {self.share}"


@dataclass(frozen=True, slots=True)
class WideningConfig:
    """The tiling of the widening GEMM: blocks of 128 weight rows.

    Attributes:
        split: blocks of a cluster that split the columns of one tile (split-K).
    """

    split: int = 1

    def parts(self, weight_rows: int) -> int:
        """How many partial sums of squares a GEMM with `weight_rows` rows of weights writes per row of output."""
        return -(-weight_rows // 128) * 4

    def __str__(self) -> str:
        return f"widening WGMMA split {self.split}"


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """The configuration of the split-KV attention kernel that merges within clusters.

    Attributes:
        warps: warps per block, 4 or 8; each processes 16 keys per step.
        stages: steps whose keys are in flight, at least 2, for a head dimension of 128; twice as many for 64.
        largest: maximum blocks per cluster, up to 16; above 8 a device may not support it.
    """

    warps: int
    stages: int
    largest: int


@dataclass(frozen=True, slots=True)
class SplitConfig:
    """The configuration of split-KV attention.

    Attributes:
        tile: keys per step; a power of two.
        num_warps: warps per program.
        stages: tiles in flight.
        programs_per_sm: number of programs per SM at which the split aims.
        max_partial_rows: maximum splits times rows to merge per request and KV head; wide passes get fewer splits.
        alone: up to this many tiles, one program processes all of them and nothing is merged.
        scheduled: the lengths of a pass decide on its splits and on the order of its programs; otherwise all requests have as many splits.
        whole: one program processes all keys of a request, and those of the longest requests start first.
        cluster: the configuration of the cluster kernel, for the passes that it supports; None: the two Triton kernels run all passes.
    """

    tile: int
    num_warps: int
    stages: int
    programs_per_sm: int
    max_partial_rows: int = 512
    alone: int = 4
    scheduled: bool = False
    whole: bool = False
    cluster: ClusterConfig | None = None

    @property
    def ordered(self) -> bool:
        """Whether the lengths of a pass decide on the order of its programs."""
        return self.scheduled or self.whole


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """The configuration of split-KV attention over latent rows.

    Attributes:
        tile: rows per step; a power of two.
        block_m: maximum queries times heads per program; a power of two, at least 16.
        num_warps: warps per program.
        stages: tiles in flight.
        programs_per_sm: number of programs per SM at which the split aims.
    """

    tile: int
    block_m: int
    num_warps: int
    stages: int
    programs_per_sm: int = 1


@dataclass(frozen=True, slots=True)
class StepConfig:
    """The tiling of an expert kernel for few tokens: tiles of `block_n` weight rows by `unroll` times `block_k` columns.

    Attributes:
        unroll: pieces of `block_k` columns that are loaded together; one scale applies to a piece.
        stages: tiles in flight.
    """

    block_n: int
    block_k: int
    unroll: int
    num_warps: int
    stages: int

    def parts(self, weight_rows: int) -> int:
        """How many partial sums of squares a GEMM with `weight_rows` rows of weights writes per row of output."""
        return -(-weight_rows // self.block_n)

    def __str__(self) -> str:
        return f"{self.block_n}x{self.unroll}x{self.block_k} warps {self.num_warps} stages {self.stages}"


@dataclass(frozen=True, slots=True)
class GroupedConfig:
    """The tiling of the grouped GEMM for many tokens: tiles of `rows` pairs by `block_n` weight rows.

    Attributes:
        tiles_together: number of tiles of pairs whose programs are adjacent for the same weight rows.
        fp8_rows: multiply e4m3 by e4m3 if the weights allow it.
    """

    rows: int
    block_n: int
    block_k: int
    num_warps: int
    stages: int
    tiles_together: int = 1
    fp8_rows: bool = False

    def __str__(self) -> str:
        tile, mark = f"{self.rows}x{self.block_n}x{self.block_k}", " fp8 rows" if self.fp8_rows else ""
        return f"{tile} warps {self.num_warps} stages {self.stages} together {self.tiles_together}{mark}"


@dataclass(frozen=True, slots=True)
class WgmmaExpertsConfig:
    """The tiling of the grouped WGMMA GEMMs: tiles of `rows` pairs, 128 or 192, by weight rows.

    Attributes:
        gate_up_tile, down_tile: weight rows per tile of either GEMM, multiples of 32: up to 256 with 128 pairs and up to 192 with 192
            pairs; with e4m3 weights 256, and 128 pairs.
        cluster: 2 if pairs of blocks share the weights of neighbouring tiles of pairs, else 1.
    """

    rows: int = 128
    gate_up_tile: int = 256
    down_tile: int = 256
    cluster: int = 2

    def __str__(self) -> str:
        return f"WGMMA {self.rows}x{self.gate_up_tile}/{self.down_tile} cluster {self.cluster}"
