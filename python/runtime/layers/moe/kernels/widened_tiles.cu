// Definitions shared by the parts of a grouped GEMM with converted weights (`widened_experts.cu`): tiles of pairs and of weights, and their
// layout in shared memory.
//
// Defined before this text: CODE_BITS (of a weight), PAIRS, STAGES, GATED; ROWS (64 for each multiplying warpgroup), and the rest that
// gemm/wgmma_parts.cu and grouped_parts.cu need.

constexpr int MATRIX = 64, GROUPS = MULTIPLIERS / 128, MATRICES = 2 * GROUPS;  // rows of weights; warpgroups that multiply; of a tile
constexpr int OUTPUTS = GATED ? GROUPS * MATRIX : MATRICES * MATRIX;  // columns of the output of a tile
constexpr int DEPTH = 128, CODE_BYTES = DEPTH * CODE_BITS / 8;  // columns of a stage; bytes of a row of weights in it
constexpr int MATRIX_BYTES = MATRIX * CODE_BYTES, W_BYTES = MATRICES * MATRIX_BYTES;
constexpr int HALF_BYTES = PAIRS * 128, STAGE_BYTES = W_BYTES + 2 * HALF_BYTES;  // of 64 columns of x
constexpr int SCALES_AT = STAGES * STAGE_BYTES;                // scales of weights follow the ring

// A tile of pairs, of which `count` are real, by a tile of weights.
struct Item { int expert, tile, column, count; };

struct Work {
    Tiles tiles;
    int each, count;  // items of a tile of pairs; all of them

    __device__ __forceinline__ Work(const Tiles& tiles, int columns) : tiles(tiles) {
        each = (columns + OUTPUTS - 1) / OUTPUTS;
        count = *tiles.used * each;
    }
    __device__ __forceinline__ Item item(int i) const {
        const int tile = i / each;
        return {tiles.experts[tile], tile, i % each, min(tiles.places[2 * tile + 1], PAIRS)};
    }
};

// The first row of matrix `m` of an item in the weights of its expert, or -1 where it is past the last one. `rows`: of an expert.
__device__ __forceinline__ int first_row(const Item& item, int m, int rows) {
    if (GATED) {
        const int row = item.column * OUTPUTS + m / 2 * MATRIX;
        return row < rows / 2 ? row + m % 2 * (rows / 2) : -1;
    }
    const int row = item.column * OUTPUTS + m * MATRIX;
    return row < rows ? row : -1;
}

// The row of a warp's 16 that lane (g, t) has first (`high`: second) in the fragments.
__device__ __forceinline__ int fragment_row(int lane, int high) { return lane / 4 + 8 * high; }
// The row of a matrix whose 16 bytes a lane gives to `matrices`.
__device__ __forceinline__ int matrix_row(int warp, int lane) { return 16 * warp + lane % 16; }

__device__ __forceinline__ int stages_of(int width) { return (width + DEPTH - 1) / DEPTH; }
// By a warp, which has read what `barrier` guards.
__device__ __forceinline__ void release(u32 barrier, int lane) {
    if (lane == 0) barrier_arrive(barrier);
}
