"""How the hand-written kernels cut their work: plain data, without torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TritonConfig:
    """How the Triton GEMM is cut: tiles of `block_n` weight rows by `block_k` columns, `stages` of them in flight.

    Attributes:
        swap: the weight tile is the tensor cores' left operand and x the right one, which then needs no padding to 16 rows.
        tma: tiles come by descriptor (Hopper's copy engine), not by the threads' own loads.
        prefetch: columns of each weight row that are prefetched into L2 while the previous kernel still runs.
        late: the next kernel may start at the end of the main loop, not at its beginning.
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
    """How the GEMM by fragments is cut: blocks of `tall` times 16 weight rows, whose columns `warps` warps share.

    Attributes:
        batch: loads of a lane in flight, for each of its two rows.
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
    """How the GEMM with resident weights is cut: blocks of 16 weight rows, whose columns `warps` warps share.

    Attributes:
        depth: stages of 64 columns that each warp holds at once.
        blocks: blocks that share a multiprocessor.
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
class WideningConfig:
    """How the GEMM that widens e4m3 weights for WGMMA is cut: blocks of 128 weight rows.

    Attributes:
        split: blocks of a cluster that share the columns of one tile (split-K).
    """

    split: int = 1

    def parts(self, weight_rows: int) -> int:
        """How many partial sums of squares a GEMM with `weight_rows` rows of weights writes per row of output."""
        return -(-weight_rows // 128) * 4

    def __str__(self) -> str:
        return f"widening WGMMA split {self.split}"


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """How the kernel of split-KV attention that merges within clusters cuts its work.

    Attributes:
        warps: warps of a block, 4 or 8; each takes 16 keys per step.
        stages: steps of which keys are in flight, at least 2, for a head dimension of 128; twice as many for 64.
        largest: most blocks of a cluster, up to 16; above 8 a device may run none at once.
    """

    warps: int
    stages: int
    largest: int


@dataclass(frozen=True, slots=True)
class SplitConfig:
    """How split-KV attention cuts its work.

    Attributes:
        tile: keys of one step; a power of two.
        num_warps: warps of a program.
        stages: tiles in flight.
        programs_per_sm: programs that the split aims at for each multiprocessor.
        max_partial_rows: splits times rows that a request and KV head may have to merge; wide passes get fewer splits.
        alone: up to this many tiles, one program takes all of them and nothing is merged.
        scheduled: programs follow a `WorkSchedule` made from the lengths of the pass; otherwise each request has its own.
        cluster: the cut of the one kernel that computes and merges, for the passes that it supports; None: Triton's two kernels run all.
    """

    tile: int
    num_warps: int
    stages: int
    programs_per_sm: int
    max_partial_rows: int = 512
    alone: int = 4
    scheduled: bool = False
    cluster: ClusterConfig | None = None


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """How split-KV attention over latent rows cuts its work.

    Attributes:
        tile: rows of one step; a power of two.
        block_m: most queries times heads of one program; a power of two, at least 16.
        num_warps: warps of a program.
        stages: tiles in flight.
        programs_per_sm: programs that the split aims at for each multiprocessor.
    """

    tile: int
    block_m: int
    num_warps: int
    stages: int
    programs_per_sm: int = 1


@dataclass(frozen=True, slots=True)
class StepConfig:
    """How a kernel of weights in any format is cut: tiles of `block_n` weight rows by `unroll` times `block_k` columns.

    Attributes:
        unroll: pieces of `block_k` columns that are loaded together; a scale holds for one piece.
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
    """How the grouped GEMM of many rows is cut: tiles of `rows` pairs by `block_n` weight rows.

    Attributes:
        tiles_together: tiles of pairs whose programs run side by side for the same weight rows.
        fp8_rows: multiply e4m3 by e4m3 where the weights allow it.
        tma: weights that need no widening come by descriptor (Hopper's copy engine), not by the threads' own loads.
    """

    rows: int
    block_n: int
    block_k: int
    num_warps: int
    stages: int
    tiles_together: int = 1
    fp8_rows: bool = False
    tma: bool = False

    def __str__(self) -> str:
        marks = f"{' fp8 rows' if self.fp8_rows else ''}{' tma' if self.tma else ''}"
        return (
            f"{self.rows}x{self.block_n}x{self.block_k} warps {self.num_warps} stages {self.stages} together {self.tiles_together}{marks}"
        )


@dataclass(frozen=True, slots=True)
class WgmmaExpertsConfig:
    """How the grouped GEMMs by WGMMA are cut: tiles of `rows` pairs, 128 or 192, by weight rows.

    Attributes:
        gate_up_tile, down_tile: weight rows of a tile of either GEMM, multiples of 32 up to 256 beside 128 pairs and up to 192 beside 192;
            256 beside 128 with weights in e4m3.
        cluster: 2 where pairs of blocks share the weights of neighbouring tiles of pairs, else 1.
    """

    rows: int = 128
    gate_up_tile: int = 256
    down_tile: int = 256
    cluster: int = 2

    def __str__(self) -> str:
        return f"WGMMA {self.rows}x{self.gate_up_tile}/{self.down_tile} cluster {self.cluster}"
