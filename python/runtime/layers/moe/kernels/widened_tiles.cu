// Definitions shared by the parts of a grouped GEMM with converted weights (`widened_experts.cu`): tiles of pairs and of weights, and their
// layout in shared memory.
//
// Defined before this text: CODE_BITS (of a weight), PAIRS, STAGES, GATED; ROWS (64 for each multiplying warpgroup), and the rest that
// gemm/wgmma_parts.cu and grouped_parts.cu need.

constexpr int MATRIX = 64, GROUPS = MULTIPLIERS / 128, MATRICES = 2 * GROUPS;  // rows of weights; warpgroups that multiply; of a tile
constexpr int UNITS = GATED ? GROUPS : MATRICES;  // of 64 columns of the output, in a tile: one matrix, or a gate's and an up's
constexpr int DEPTH = 128, CODE_BYTES = DEPTH * CODE_BITS / 8;  // columns of a stage; bytes of a row of weights in it
constexpr int MATRIX_BYTES = MATRIX * CODE_BYTES, W_BYTES = MATRICES * MATRIX_BYTES;
constexpr int HALF_BYTES = PAIRS * 128, STAGE_BYTES = W_BYTES + 2 * HALF_BYTES;  // of 64 columns of x
constexpr int SCALES_AT = STAGES * STAGE_BYTES;                // scales of weights follow the ring

// Values that are the same in all lanes, known to the compiler to be.
__device__ __forceinline__ int uniform(int x) { return __shfl_sync(~0u, x, 0); }

// A tile of pairs, of which `count` are real, by a tile of weights: `units` of them from `unit` on.
struct Item { int expert, tile, unit, units, count; };

struct Work {
    Tiles tiles;
    int units, each, count;  // units of a tile of pairs; items of one, and of all

    __device__ __forceinline__ Work(const Tiles& tiles, int columns) : tiles(tiles) {
        units = columns / MATRIX;
        each = (units + UNITS - 1) / UNITS;
        count = uniform(*tiles.used) * each;
    }
    __device__ __forceinline__ Item item(int tile, int unit, int most) const {
        return {tiles.experts[tile], tile, unit, min(most, units - unit), min(uniform(tiles.places[2 * tile + 1]), PAIRS)};
    }
};

// The items of a block. Blocks take items round robin, so that neighbours read the same weights from L2. If the last round has items for at most half
// of the blocks, all of them share its units.
struct Items {
    const Work& work;
    int at, whole, unit, end;  // the next item, and the first one that is shared; this block's units of those

    __device__ __forceinline__ Items(const Work& work) : work(work), at(blockIdx.x) {
        const int block = blockIdx.x, blocks = gridDim.x, left = work.count % blocks;
        whole = work.count - (2 * left > blocks ? 0 : left);
        const int first = first_unit(whole), shared = first_unit(work.count) - first;
        unit = first + shared * block / blocks;
        end = first + shared * (block + 1) / blocks;
    }
    __device__ __forceinline__ int first_unit(int item) const { return item / work.each * work.units + item % work.each * UNITS; }
    __device__ __forceinline__ bool inside() const { return at < whole || unit < end; }
    __device__ __forceinline__ Item next() {
        if (at < whole) {
            const Item item = work.item(at / work.each, at % work.each * UNITS, UNITS);
            at += gridDim.x;
            return item;
        }
        const Item item = work.item(unit / work.units, unit % work.units, min(end - unit, UNITS));
        unit += item.units;
        return item;
    }
};

// The first row of matrix `m` of an item in the weights of its expert, or -1 if it has fewer. `rows`: of an expert.
__device__ __forceinline__ int first_row(const Item& item, int m, int rows) {
    if (GATED) return m / 2 < item.units ? (item.unit + m / 2) * MATRIX + m % 2 * (rows / 2) : -1;
    return m < item.units ? (item.unit + m) * MATRIX : -1;
}

// The row of a warp's 16 that lane (g, t) has first (`high`: second) in the fragments.
__device__ __forceinline__ int fragment_row(int lane, int high) { return lane / 4 + 8 * high; }
// The row of a matrix whose 16 bytes a lane gives to `matrices`.
__device__ __forceinline__ int matrix_row(int warp, int lane) { return 16 * warp + lane % 16; }

__device__ __forceinline__ int stages_of(int width) { return (width + DEPTH - 1) / DEPTH; }
// Called by a whole warp when it has read the stage or slot that the `empty` mbarrier guards; lane 0 arrives.
__device__ __forceinline__ void release(u32 barrier, int lane) {
    if (lane == 0) barrier_arrive(barrier);
}
