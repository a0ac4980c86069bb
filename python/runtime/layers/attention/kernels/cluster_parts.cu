// Parts of the cluster attention kernel besides `primitives.cu`: its argument, copies of keys and values, and the positions of rows.
//
// Constants from the host: D (64 or 128), ROW_TILES (1 or 2: 16 rows each, queries times heads of a group, that a cluster computes), WARPS (4 or
// 8), STAGES (steps of which keys are copied ahead, at least 2), MOST_BLOCKS (of a cluster), EARLY (whether the kernel starts before the previous
// one has ended), ROTATES (whether `q` holds rows of the qkv projection, see `new_heads.cu`), MOST_NEW (tokens of a request in such a pass).

constexpr int THREADS = 32 * WARPS, ROWS = 16 * ROW_TILES;
constexpr int TILE_KEYS = 16, ROW_BYTES = 2 * D, CHUNKS = D / 8;  // chunks of 16 bytes of a key or value
constexpr int TILE_BYTES = TILE_KEYS * ROW_BYTES, STAGE_BYTES = WARPS * TILE_BYTES;
constexpr int STEP_WEIGHTS = WARPS * ROW_TILES * 512;   // bytes of the weights of a step
constexpr int LINES = ROW_BYTES / 128;                  // of a key or value in L2
constexpr int GROUPS = D / 8 / WARPS;                   // of eight columns of the values, of a warp
constexpr int CHAINS = ROW_TILES == 1 ? 2 : 1;          // sums of a score that do not wait for each other
constexpr int MERGED_AT_ONCE = 8;
constexpr int STEPS_AHEAD = 2;                          // whose keys are prefetched into L2, beyond those that are copied

struct Pass {
    const u16* q;  // [B * width, heads, D]; if it ROTATES, rows of the qkv projection
    u16 *k, *v;    // caches by slot
    u16* out;      // [B * width, heads, D]
    const int *pages, *rows, *lens;
    const void* sinks;     // one per head, float32 or bfloat16, or null
    const long long *positions, *slots;  // of the new tokens
    const float* cos_sin;                // [positions, 16 * rotated_pairs]
    const u16 *q_gain, *k_gain;          // of the norms, or null
    float scale;                         // of scores, times the base-2 logarithm of e
    float q_eps, k_eps;
    int kv_heads, group, inverse, row_blocks;  // inverse: of `group`, times 65536; row_blocks: clusters of a request and KV head
    int width, window, causal, page_shift, pages_stride, float_sinks;
    int rotated_pairs;  // pairs of chunks of a head that rotate
};

enum Part { ALL, STORED, FRESH };  // which keys of a tile are copied: those of earlier passes, those of this one

__device__ __forceinline__ void prefetch(const void* line) { asm volatile("prefetch.global.L2 [%0];" :: "l"(line)); }

// Swizzle of keys: odd keys have the halves of each 128 bytes swapped. A quarter warp reads four chunks of two keys without bank conflicts.
__device__ __forceinline__ int key_chunk(int key, int chunk) { return chunk ^ (key & 1) << 2; }
// Swizzle of values: the same columns of eight values, which ldmatrix reads together, are in different banks.
__device__ __forceinline__ int value_chunk(int key, int chunk) { return chunk ^ (key & 7); }

// Copies the keys, or the values, of one tile, by the 32 lanes of a warp; zeros from key `stop` on. `row` of lanes 0 to 15: the key's row in
// the cache, of D values. FRESH keys are those from `fresh` to `stop`.
template <Part PART, bool VALUES>
__device__ __forceinline__ void copy_tile(u32 to, const u16* cache, u32 row, int first_key, int fresh, int stop) {
    constexpr int TOGETHER = 32 / CHUNKS;  // keys of an instruction
    const int lane = threadIdx.x % 32, chunk = lane % CHUNKS;
    #pragma unroll 4
    for (int i = 0; i < TILE_KEYS / TOGETHER; i++) {
        const int key = i * TOGETHER + lane / CHUNKS, at = first_key + key;
        const u8* const from = (const u8*)cache + (u64)__shfl_sync(~0u, row, key) * ROW_BYTES + chunk * 16;
        const bool is_fresh = at >= fresh && at < stop;
        if (PART == ALL || is_fresh == (PART == FRESH))
            copy16<128>(to + key * ROW_BYTES + (VALUES ? value_chunk(key, chunk) : key_chunk(key, chunk)) * 16, from, at < stop);
    }
}

// The query of a row, its query head, and where that lies in `q` and `out`; `head` is the KV head, whose group the rows go through for each query.
__device__ __forceinline__ int query_of(const Pass& pass, int row) { return row * pass.inverse >> 16; }
__device__ __forceinline__ int head_of(const Pass& pass, int head, int row) {
    return head * pass.group + row - query_of(pass, row) * pass.group;
}
__device__ __forceinline__ long place_of(const Pass& pass, int b, int head, int row) {
    return ((long)(b * pass.width + query_of(pass, row)) * (pass.kv_heads * pass.group) + head_of(pass, head, row)) * D;
}
