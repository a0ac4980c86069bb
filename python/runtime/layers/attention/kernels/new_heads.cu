// Norms and rotates the query, key and value heads of a pass's new tokens, from rows of the qkv projection, and stores them where attention reads
// them.
//
// Each block needs all of its queries and puts them into shared memory. A new key and its value are in one tile, so one block of a cluster reads
// them: it puts them among its cached keys in shared memory, and stores them in the cache. If their tile is beyond the prefetched stages, the block
// reads them back from the cache; then all clusters with the same request and KV head store them, with the same bits.
//
// HEAD_LANES lanes share a head. Each lane has two chunks of eight columns, which are rotated together or not at all, as in `rope_and_cache.py`.

constexpr int HEAD_LANES = D / 16, HEADS = 32 / HEAD_LANES;  // heads of a warp at once
constexpr int ROUNDS = (ROWS + 2 * MOST_NEW + HEADS * WARPS - 1) / (HEADS * WARPS);
static_assert(ROWS % HEADS == 0 && MOST_NEW % HEADS == 0, "the heads of a warp are of one kind");

enum Kind { QUERY, KEY, VALUE };

// The work of a block: rows from `first_row` on, over tiles from `begin` on and keys before `stop`. Keys from `fresh` on are new.
struct Block { int head, first_row, begin, fresh, stop; };

// A lane's part of a head.
struct NewHead {
    Kind kind;
    int index;        // row of a query, or token of a key or value
    int low, high;    // the lane's chunks
    const u16* from;  // source of the lower chunk; null if the block does not need the head
    long slot;        // KV slot of a key or value
    u32 kept[2];      // shared-memory addresses of the chunks; 0 if they are not kept
    u16* stored;      // cache address of the lower chunk; null if it is not stored
    int apart;        // distance from the lower chunk to the higher, in values
    float cos[8], sin[8];
    uint4 gains[2];
};

// The lane's part of the head that its warp processes in a round. Sets the fields that depend neither on the preceding kernel nor on the
// request's length.
__device__ __forceinline__ NewHead new_head(const Pass& pass, int b, int kv_head, int first_row, int rows, int round) {
    const int lane = threadIdx.x % 32, first = (round * WARPS + threadIdx.x / 32) * HEADS, own = lane % HEAD_LANES;
    const int q_heads = pass.kv_heads * pass.group;
    const bool rotates = own < pass.rotated_pairs;
    NewHead h;
    h.kind = first < ROWS ? QUERY : first < ROWS + MOST_NEW ? KEY : VALUE;
    h.index = first + lane / HEAD_LANES - (h.kind == QUERY ? 0 : h.kind == KEY ? ROWS : ROWS + MOST_NEW);
    h.low = rotates ? own : own + pass.rotated_pairs;
    h.high = h.low + (rotates ? pass.rotated_pairs : CHUNKS / 2 - pass.rotated_pairs);
    h.from = nullptr;
    h.slot = 0;
    h.gains[0] = h.gains[1] = make_uint4(0, 0, 0, 0);
    #pragma unroll
    for (int i = 0; i < 8; i++) h.cos[i] = 1.0f, h.sin[i] = 0.0f;
    if (h.index >= (h.kind == QUERY ? rows : pass.width)) return h;
    const int query = first_row + h.index, token = b * pass.width + (h.kind == QUERY ? query_of(pass, query) : h.index);
    const int place = h.kind == QUERY ? head_of(pass, kv_head, query) : q_heads + kv_head + (h.kind == KEY ? 0 : pass.kv_heads);
    h.from = pass.q + ((long)token * (q_heads + 2 * pass.kv_heads) + place) * D + 8 * h.low;
    if (h.kind != QUERY) h.slot = pass.slots[token];
    if (h.kind == VALUE) return h;
    const long long position = pass.positions[token];
    const u16* const gain = h.kind == QUERY ? pass.q_gain : pass.k_gain;
    if (gain != nullptr) h.gains[0] = *(const uint4*)(gain + 8 * h.low), h.gains[1] = *(const uint4*)(gain + 8 * h.high);
    if (rotates) {
        const float* const angles = pass.cos_sin + position * (16 * pass.rotated_pairs) + 8 * own;  // cosines, then as many sines
        #pragma unroll
        for (int i = 0; i < 8; i += 4) {
            const float4 cos = *(const float4*)(angles + i), sin = *(const float4*)(angles + 8 * pass.rotated_pairs + i);
            h.cos[i] = cos.x, h.cos[i + 1] = cos.y, h.cos[i + 2] = cos.z, h.cos[i + 3] = cos.w;
            h.sin[i] = sin.x, h.sin[i + 1] = sin.y, h.sin[i + 2] = sin.z, h.sin[i + 3] = sin.w;
        }
    }
    return h;
}

// Computes where the head is stored. The `asm` makes the compiler do this before the wait instead of when the values arrive.
__device__ __forceinline__ void place_head(const Pass& pass, const Block& block, NewHead& h, u32 queries, u32 keys, u32 values) {
    const int first_key = block.begin * TILE_KEYS, at = block.fresh + h.index;
    h.stored = nullptr;
    h.apart = 8 * (h.high - h.low);
    if (h.kind == QUERY) {  // rows beyond the last one become zeros
        if (first_key >= block.stop) h.from = nullptr;
        #pragma unroll
        for (int i = 0; i < 2; i++) h.kept[i] = queries + h.index * ROW_BYTES + key_chunk(h.index, i == 0 ? h.low : h.high) * 16;
    } else {
        if (at < first_key || at >= block.stop) h.from = nullptr;
        const int place = at - first_key, key = place % TILE_KEYS;
        const bool ahead = place < STAGES * WARPS * TILE_KEYS;
        #pragma unroll
        for (int i = 0; i < 2; i++) {
            const int chunk = i == 0 ? h.low : h.high;
            const u32 to = h.kind == KEY ? keys + key_chunk(key, chunk) * 16 : values + value_chunk(key, chunk) * 16;
            h.kept[i] = h.from != nullptr && ahead ? to + place * ROW_BYTES : 0;
        }
        if (h.from != nullptr && (block.first_row == 0 || !ahead))
            h.stored = (h.kind == KEY ? pass.k : pass.v) + (h.slot * pass.kv_heads + block.head) * D + 8 * h.low;
    }
    asm volatile("" : "+r"(h.kept[0]), "+r"(h.kept[1]), "+l"(h.from), "+l"(h.stored), "+r"(h.apart));
}

__device__ __forceinline__ uint4 load_global(const u16* from) {
    uint4 v;
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from) : "memory");
    return v;
}
__device__ __forceinline__ void store_shared(u32 to, uint4 v) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" :: "r"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
__device__ __forceinline__ void widen8(float (&to)[8], uint4 from) {
    const u32 words[4] = {from.x, from.y, from.z, from.w};
    #pragma unroll
    for (int i = 0; i < 4; i++) to[2 * i] = of_bf16(words[i] & 0xFFFF), to[2 * i + 1] = of_bf16(words[i] >> 16);
}
__device__ __forceinline__ uint4 narrow8(const float (&x)[8]) {
    return make_uint4(to_bf16x2(x[0], x[1]), to_bf16x2(x[2], x[3]), to_bf16x2(x[4], x[5]), to_bf16x2(x[6], x[7]));
}

// Replaces NaN and infinity by zero, as in all KV caches (`finite.py`).
__device__ __forceinline__ u32 finite2(u32 two) {
    if ((two & 0x7F80) == 0x7F80) two &= 0xFFFF0000;
    if ((two & 0x7F800000) == 0x7F800000) two &= 0xFFFF;
    return two;
}
__device__ __forceinline__ uint4 finite8(uint4 v) { return make_uint4(finite2(v.x), finite2(v.y), finite2(v.z), finite2(v.w)); }

// Norms and rotates a query or key; the lane has its chunks `low` and `high`.
__device__ __forceinline__ void rotate(const Pass& pass, const NewHead& h, uint4& low, uint4& high) {
    float x[8], y[8];
    widen8(x, low);
    widen8(y, high);
    if (pass.q_gain != nullptr) {
        float gain[8], high_gain[8], sums[4] = {}, factor;
        widen8(gain, h.gains[0]);
        widen8(high_gain, h.gains[1]);
        #pragma unroll
        for (int i = 0; i < 8; i++) sums[i % 2] = fmaf(x[i], x[i], sums[i % 2]), sums[2 + i % 2] = fmaf(y[i], y[i], sums[2 + i % 2]);
        const float sum = sum_of_lanes<HEAD_LANES>((sums[0] + sums[1]) + (sums[2] + sums[3]));
        asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(factor) : "f"(sum / D + (h.kind == QUERY ? pass.q_eps : pass.k_eps)));
        #pragma unroll
        for (int i = 0; i < 8; i++) x[i] = x[i] * factor * gain[i], y[i] = y[i] * factor * high_gain[i];
    }
    #pragma unroll
    for (int i = 0; i < 8; i++) {  // with the same rounding as the Triton kernel
        const float rotated = __fmaf_rn(x[i], h.cos[i], -__fmul_rn(y[i], h.sin[i]));
        y[i] = __fmaf_rn(y[i], h.cos[i], __fmul_rn(x[i], h.sin[i]));
        x[i] = rotated;
    }
    low = narrow8(x);
    high = narrow8(y);
}

// Processes a head, whose chunks `low` and `high` the lane has loaded, and stores it where `place_head` determined.
__device__ __forceinline__ void store_head(const Pass& pass, const NewHead& h, uint4 low, uint4 high) {
    if (h.kind != VALUE) rotate(pass, h, low, high);
    if (h.kind != QUERY) low = finite8(low), high = finite8(high);
    if (h.kept[0] != 0) {
        store_shared(h.kept[0], low);
        store_shared(h.kept[1], high);
    }
    if (h.stored != nullptr) {
        store16(h.stored, low);
        store16(h.stored + h.apart, high);
    }
}
