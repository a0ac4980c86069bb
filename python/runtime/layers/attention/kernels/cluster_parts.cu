// What the kernel of attention in clusters is made of: its argument, copies of keys and values, tensor cores, and the memory of other blocks.
//
// Sources: PTX ISA, "mma.m16n8k16", "ldmatrix", "cp.async", "mapa", "st.async", "barrier.cluster", "griddepcontrol".
//
// Constants from the host: D (64 or 128), ROW_TILES (1 or 2: 16 rows each, queries times heads of a group, that a cluster computes), WARPS (4 or
// 8), STAGES (steps of which keys are copied ahead, at least 2), MOST_BLOCKS (of a cluster), EARLY (whether the kernel starts before the previous
// one has ended), ROTATES (whether `q` holds rows of the qkv projection, see `new_heads.cu`), MOST_NEW (tokens of a request in such a pass).

typedef unsigned char u8; typedef unsigned short u16; typedef unsigned int u32; typedef unsigned long long u64;

constexpr int THREADS = 32 * WARPS, ROWS = 16 * ROW_TILES;
constexpr int TILE_KEYS = 16, ROW_BYTES = 2 * D, CHUNKS = D / 8;  // chunks of 16 bytes of a key or value
constexpr int TILE_BYTES = TILE_KEYS * ROW_BYTES, STAGE_BYTES = WARPS * TILE_BYTES;
constexpr int STEP_WEIGHTS = WARPS * ROW_TILES * 512;   // bytes of the weights of a step
constexpr int LINES = ROW_BYTES / 128;                  // of a key or value in L2
constexpr int GROUPS = D / 8 / WARPS;                   // of eight columns of the values, of a warp
constexpr int CHAINS = ROW_TILES == 1 ? 2 : 1;          // sums of a score that do not wait for each other
constexpr int MERGED_AT_ONCE = 8;
constexpr int STEPS_AHEAD = 2;                          // whose keys are prefetched into L2, beyond those that are copied
#define NO_SCORE __int_as_float(0xFF800000)  // minus infinity, which NVRTC has no constant for

struct Pass {
    const u16* q;  // [B * width, heads, D]; if it ROTATES, rows of the qkv projection
    u16 *k, *v;    // caches by slot
    u16* out;      // [B * width, heads, D]
    const int *pages, *rows, *lens;
    const void* sinks;     // one per head, float32 or bfloat16, or null
    const long long *positions, *slots;  // of the new tokens
    const float* cos_sin;                // [positions, 16 * turning]
    const u16 *q_gain, *k_gain;          // of the norms, or null
    float scale;                         // of scores, times the base-2 logarithm of e
    float q_eps, k_eps;
    int kv_heads, group, inverse, row_blocks;  // inverse: of `group`, times 65536; row_blocks: clusters of a request and KV head
    int width, window, causal, page_shift, pages_stride, float_sinks;
    int turning;  // pairs of chunks of a head that rotate
};

enum Part { ALL, STORED, FRESH };  // which keys of a tile are copied: those of earlier passes, those of this one

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void copy16(u32 shared, const void* global, bool in) {  // zeros if not `in`
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" :: "r"(shared), "l"(global), "r"(in ? 16 : 0) : "memory");
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING> __device__ __forceinline__ void wait_copies() { asm volatile("cp.async.wait_group %0;" :: "n"(PENDING) : "memory"); }

__device__ __forceinline__ void prefetch(const void* line) { asm volatile("prefetch.global.L2 [%0];" :: "l"(line)); }

template <int COUNT> __device__ __forceinline__ void load_transposed(u32 (&to)[2 * COUNT], u32 row) {  // of 16 keys x 8 COUNT columns
    if constexpr (COUNT == 2)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
            : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(row) : "memory");
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];" : "=r"(to[0]), "=r"(to[1]) : "r"(row) : "memory");
}

__device__ __forceinline__ void mma(float (&sums)[4], u32 g_low, u32 h_low, u32 g_high, u32 h_high, u32 x_low, u32 x_high) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(g_low), "r"(h_low), "r"(g_high), "r"(h_high), "r"(x_low), "r"(x_high));
}

__device__ __forceinline__ float of_bf16(u16 bits) { return __uint_as_float((u32)bits << 16); }

__device__ __forceinline__ float exp2_of(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ u32 narrow(float low, float high) {
    u32 both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}

__device__ __forceinline__ u32 cluster_size() { u32 n; asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(n)); return n; }
__device__ __forceinline__ u32 cluster_id() { u32 n; asm("mov.u32 %0, %%clusterid.x;" : "=r"(n)); return n; }
__device__ __forceinline__ u32 cluster_rank() { u32 n; asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(n)); return n; }

// The address of another block's shared memory where `shared` lies in this one's.
__device__ __forceinline__ u32 address_in(u32 shared, u32 rank) {
    u32 mapped;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(shared), "r"(rank));
    return mapped;
}
// Stores in the memory of another block, and counts the bytes at its barrier.
__device__ __forceinline__ void send(u32 mapped, u32 mapped_barrier, float x, float y) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];"
        :: "r"(mapped), "f"(x), "f"(y), "r"(mapped_barrier) : "memory");
}
__device__ __forceinline__ void barrier_init(u32 barrier) {  // for one arrival; other blocks see it after the cluster's barrier
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;\nfence.mbarrier_init.release.cluster;" :: "r"(barrier) : "memory");
}
__device__ __forceinline__ void barrier_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrier_wait(u32 barrier) {
    asm volatile(
        "{\n.reg .pred done;\nAGAIN:\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], 0;\n@!done bra AGAIN;\n}"
        :: "r"(barrier) : "memory");
}
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
__device__ __forceinline__ void launch_next() { if (EARLY) asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
__device__ __forceinline__ void wait_for_previous() { if (EARLY) asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Scores are compared with the largest so far; where there is none, with 0.
__device__ __forceinline__ float finite_top(float top) { return top == NO_SCORE ? 0.0f : top; }

// The columns of odd keys have their halves of 128 bytes swapped: a quarter warp, four chunks of two keys, reads all banks.
__device__ __forceinline__ int key_chunk(int key, int chunk) { return chunk ^ (key & 1) << 2; }
// Eight values that ldmatrix reads together have the same columns in different banks.
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
            copy16(to + key * ROW_BYTES + (VALUES ? value_chunk(key, chunk) : key_chunk(key, chunk)) * 16, from, at < stop);
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
