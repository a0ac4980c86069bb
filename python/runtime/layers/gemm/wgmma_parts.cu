// Parts of the WGMMA GEMM besides `primitives.cu`: clusters of blocks, TMA loads, and the ring of stages.
//
// A cluster has SPLIT sets of CLUSTER_M by CLUSTER_N blocks; the sets split K. Blocks of a set with the same rows of w compute neighbouring tiles of
// rows of x: each loads a slice of w and multicasts it to the others, so that an SM reads less from L2. Likewise, those with the same rows of x
// compute neighbouring tiles of rows of w, and share x.
//
// Sources: PTX ISA, "wgmma", "cp.async.bulk.tensor", "mbarrier", "setmaxnreg".

constexpr int COLUMNS = 64;                   // of a box: rows of 128 bytes, the width of the 128-byte swizzle
constexpr int ROW_BYTES = COLUMNS * 2;
constexpr int MULTIPLIERS = ROWS / 64 * 128;  // threads
// Registers per thread. A loading warpgroup keeps LOAD_REGISTERS and gives the rest to the multiplying ones; with a single loading warp all threads
// keep the compiler's limit.
constexpr int WARPGROUPS = ROWS / 64 + 1, ENTRY_REGISTERS = 512 / WARPGROUPS / 8 * 8;
constexpr int MULTIPLY_REGISTERS = (ENTRY_REGISTERS * WARPGROUPS - LOAD_REGISTERS) / (WARPGROUPS - 1) / 8 * 8;
constexpr int SET = CLUSTER_M * CLUSTER_N, CLUSTER = SET * SPLIT;
// L2 policies.
constexpr u64 EVICT_FIRST = 0x12F0000000000000ull, EVICT_NORMAL = 0x1000000000000000ull, EVICT_LAST = 0x14F0000000000000ull;

struct alignas(64) TensorMap { char bytes[128]; };

// Without `.release.cluster`, which would wait for all memory accesses of the thread: only wgmma has read the released stage, and it has completed.
__device__ __forceinline__ void barrier_arrive_in_cluster(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// A barrier of all threads of the cluster; with `memory`, writes before it are visible to all after it.
template <bool memory>
__device__ __forceinline__ void cluster_sync() {
    cluster_arrive<memory>();
    cluster_wait();
}

template <int count>
__device__ __forceinline__ void take_registers() {
    if constexpr (LOADERS == 128) asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(count));
}
template <int count>
__device__ __forceinline__ void leave_registers() {
    if constexpr (LOADERS == 128) asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(count));
}

// Load a box to `to` and count its bytes at `barrier`: in this block, or with multicast at the same addresses in all blocks of `mask`.
template <bool multicast>
__device__ __forceinline__ void load_box(u32 to, const TensorMap* map, u32 barrier, int column, int row, u64 policy, u16 mask) {
    if constexpr (multicast) {
        asm volatile(
            "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint "
            "[%0], [%1, {%3, %4}], [%2], %6, %5;" ::"r"(to),
            "l"(map), "r"(barrier), "r"(column), "r"(row), "l"(policy), "h"(mask)
            : "memory");
    } else {
        asm volatile(
            "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(to),
            "l"(map), "r"(barrier), "r"(column), "r"(row), "l"(policy)
            : "memory");
    }
}

// A block's place in its cluster.
struct Place {
    int m, n, part;

    __device__ __forceinline__ Place() {
        const int rank = blockIdx.x % CLUSTER;
        m = rank % CLUSTER_M, n = rank / CLUSTER_M % CLUSTER_N, part = rank / SET;
    }
    __device__ __forceinline__ int rank(int m, int n, int part) const { return (part * CLUSTER_N + n) * CLUSTER_M + m; }
    // The blocks with the same rows of w, and those with the same rows of x.
    __device__ __forceinline__ u16 w_mask() const { return ((1 << CLUSTER_M) - 1) << rank(0, n, part); }
    __device__ __forceinline__ u16 x_mask() const {
        u16 mask = 0;
#pragma unroll
        for (int i = 0; i < CLUSTER_N; i++) mask |= 1 << rank(m, i, part);
        return mask;
    }
};

// The tiles of a block. Clusters take groups of neighbouring tiles round robin. Groups with the same rows of w follow each other, so that
// w is streamed once.
struct Walk {
    int m_groups, groups, step, group;

    __device__ __forceinline__ Walk(int m_tiles, int n_tiles) {
        m_groups = (m_tiles + CLUSTER_M - 1) / CLUSTER_M;
        groups = m_groups * ((n_tiles + CLUSTER_N - 1) / CLUSTER_N);
        group = blockIdx.x / CLUSTER, step = gridDim.x / CLUSTER;
    }
    __device__ __forceinline__ bool inside() const { return group < groups; }
    __device__ __forceinline__ void next() { group += step; }
    // Either may be past the last tile: the block computes such a tile, because it loads slices for the other blocks, but does not store it.
    __device__ __forceinline__ int m_tile(const Place& place) const { return group % m_groups * CLUSTER_M + place.m; }
    __device__ __forceinline__ int n_tile(const Place& place) const { return group / m_groups * CLUSTER_N + place.n; }
};

// Stages in shared memory, used round robin. A stage is full when all its bytes have arrived, including slices that other blocks multicast. It is
// empty when the multiplying warps of all blocks of the set have read it, because this block's multicast overwrites the stage in them.
struct Ring {
    u32 data, full, empty, stage_bytes;
    int stages, stage = 0;
    u32 round = 0;

    __device__ __forceinline__ Ring(u32 data, u32 barriers, u32 stage_bytes, int stages)
        : data(data), full(barriers), empty(barriers + stages * 8), stage_bytes(stage_bytes), stages(stages) {}
    __device__ __forceinline__ void init() const {
        for (int s = 0; s < stages; s++) barrier_init(full + s * 8, 1), barrier_init(empty + s * 8, MULTIPLIERS / 32 * SET);
    }
    __device__ __forceinline__ u32 here() const { return data + stage * stage_bytes; }
    __device__ __forceinline__ u32 full_here() const { return full + stage * 8; }
    __device__ __forceinline__ u32 empty_here() const { return empty + stage * 8; }
    __device__ __forceinline__ void wait_full() const { barrier_wait(full_here(), round & 1); }
    __device__ __forceinline__ void wait_empty() const {
        if (round > 0) barrier_wait(empty_here(), (round - 1) & 1);
    }
    __device__ __forceinline__ void next() {
        if (++stage == stages) stage = 0, round++;
    }
};

// The SPLIT blocks of a tile add up their sums: each block receives its OWN of the GROUPS groups of four sums from all SPLIT blocks.
//
// Before the exchange, one thread initialises and publishes the mbarrier `arrived` and calls `expect_sums`.
template <int GROUPS, int OWN>
__device__ __forceinline__ void expect_sums(u32 arrived, const Place& place) {
    barrier_expect(arrived, max(min(GROUPS - place.part * OWN, OWN), 0) * SPLIT * MULTIPLIERS * 16);
}
// The sums overwrite the ring; they are added in the order of the blocks and returned at the front of `sums`. The loading threads must join only the
// cluster barrier.
template <int GROUPS, int OWN>
__device__ __forceinline__ void exchange(float* sums, const Place& place, u32 data, u32 arrived) {
    cluster_sync<false>();  // all blocks have finished multiplying: the ring is free
#pragma unroll
    for (int to = 0; to < SPLIT; to++) {
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            if (to * OWN + i >= GROUPS) continue;
            const float* v = sums + (to * OWN + i) * 4;
            const u32 at = data + ((place.part * OWN + i) * MULTIPLIERS + threadIdx.x) * 16;
            send(place.rank(place.m, place.n, to), at, arrived, make_float4(v[0], v[1], v[2], v[3]));
        }
    }
    // Each block waits here for the sums of all blocks, so none exits while another still writes to its shared memory.
    barrier_wait_first(arrived);
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        float* v = sums + i * 4;
#pragma unroll
        for (int from = 0; from < SPLIT; from++) {
            float a, b, c, d;
            asm volatile("ld.shared::cta.v4.f32 {%0, %1, %2, %3}, [%4];"
                         : "=f"(a), "=f"(b), "=f"(c), "=f"(d)
                         : "r"(data + ((from * OWN + i) * MULTIPLIERS + threadIdx.x) * 16)
                         : "memory");
            if (from == 0) v[0] = a, v[1] = b, v[2] = c, v[3] = d;
            else v[0] += a, v[1] += b, v[2] += c, v[3] += d;
        }
    }
}

// The wgmma descriptor of a K-major tile with rows of 128 bytes and the 128-byte swizzle: groups of 8 rows are 1024 bytes apart.
__device__ __forceinline__ u64 descriptor(u32 address) {
    return (u64)((address & 0x3FFFF) >> 4) | (1ull << 16) | (64ull << 32) | (1ull << 62);
}

__device__ __forceinline__ float widen(u16 x) {
    return BFLOAT16 ? of_bf16(x) : of_f16(x);
}

__device__ __forceinline__ u32 narrow(float low, float high) {
    if constexpr (BFLOAT16) return to_bf16x2(low, high);
    u32 both;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}

// Four e4m3 numbers as 16-bit floats: bytes 1 and 3 in `odd`, bytes 0 and 2 in `even`. A shift moves exponent and mantissa to their place in the
// float; the mask selects these bits and takes the others (sign and zeros) from `signs`. With HALF the result is float16, the number times 2^-8.
// Otherwise it is bfloat16, the number times 2^-120; multiplying by 2^120 is exact, for subnormal numbers too. NaN becomes 480.
template <bool HALF> __device__ __forceinline__ void widen_four(u32 four, u32& odd, u32& even) {
    constexpr int DOWN = HALF ? 1 : 4;
    constexpr u32 MASK = HALF ? 0x3F803F80 : 0x07F007F0;
    u32 signs;  // PTX, because the compiler would take two more instructions: it masks even and odd bytes apart
    asm("and.b32 %0, %1, 0x80808080;" : "=r"(signs) : "r"(four));
    asm("lop3.b32 %0, %1, %2, %3, 0xE4;" : "=r"(odd) : "r"(four >> DOWN), "r"(signs), "n"(MASK));
    asm("lop3.b32 %0, %1, %2, %3, 0xE4;" : "=r"(even) : "r"(four << (8 - DOWN)), "r"(signs << 8), "n"(MASK));
    if constexpr (!HALF) {
        asm("mul.rn.bf16x2 %0, %0, %1;" : "+r"(odd) : "r"(0x7B807B80));
        asm("mul.rn.bf16x2 %0, %0, %1;" : "+r"(even) : "r"(0x7B807B80));
    }
}
