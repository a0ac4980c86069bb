// Queries of absorbed latent attention, for few tokens: multiplies each head's unrotated columns by its keys, and rotates its other columns.
//
// A block computes COLUMNS latent columns of a head, and a warp 16 of them. Keys do not depend on the preceding kernel, so a block prefetches all
// its keys into shared memory while that kernel still runs, which leaves registers free for the next kernel. In memory the latent columns of a key
// are adjacent, but they are rows of the result, so ldmatrix transposes them. Tokens are copied to shared memory after the wait, once per block.
//
// As in `fragments.cu`, an instruction multiplies the 16 unrotated columns that its lanes have: lane (g, t) loads eight adjacent columns of
// token g at once, and lanes pass the keys of the same columns to ldmatrix. The blocks of a head split its pairs of columns to rotate.
//
// Constants from the host: NOPE, RANK, ROPE (columns of a head's unrotated query, of the latent, and of the rotated query), INTERLEAVED (whether
// adjacent columns rotate together; otherwise columns ROPE / 2 apart), TOKENS (8 or 16: most tokens), EARLY (whether the kernel starts before the
// preceding one has ended), WRITES (whether the first M blocks norm and rotate the KV row of a token each and store it in its slot).
//
// Source: PTX ISA, "movmatrix".

constexpr int WARPS = 4, THREADS = 32 * WARPS, COLUMNS = 16 * WARPS, TILES = TOKENS / 8;
constexpr int PARTS = RANK / COLUMNS;                          // blocks of a head
constexpr int KEY_BYTES = 2 * COLUMNS, KEY_PIECES = COLUMNS / 8;  // per key in a block; a piece has 16 bytes
constexpr int TOGETHER = THREADS / KEY_PIECES;                 // keys that the block copies at once
constexpr int CHUNKS = NOPE / 32, PIECES = NOPE / 8;           // per token
constexpr int TOKEN_BYTES = 64 * (CHUNKS | 1);                 // adjacent tokens are in different banks
constexpr int COPIES = (TOKENS * PIECES + THREADS - 1) / THREADS;
constexpr int ROTATED_PIECES = ROPE / 8;                       // pieces of four pairs to rotate, per token
static_assert(NOPE % 32 == 0 && RANK % COLUMNS == 0 && ROPE % 8 == 0 && KEY_PIECES == 8 && TOGETHER == 16);
static_assert((ROTATED_PIECES + PARTS - 1) / PARTS * TOKENS <= THREADS, "a thread rotates one piece");

// The swizzled position of a piece in its key: the eight keys that ldmatrix reads together, in pairs eight apart, have the same columns in
// different banks.
__device__ __forceinline__ int place_of(int key, int piece) { return piece ^ (key / 8 % 4 * 2 + key % 2); }

// Transposes an 8 x 8 matrix: from columns 2 t and 2 t + 1 of row g to rows 2 t and 2 t + 1 of column g.
__device__ __forceinline__ u32 transposed(u32 v) {
    u32 out;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(v));
    return out;
}

__device__ __forceinline__ float low_of(u32 both) { return __uint_as_float(both << 16); }
__device__ __forceinline__ float high_of(u32 both) { return __uint_as_float(both & 0xFFFF0000u); }

// Rotates a pair of columns.
__device__ __forceinline__ float2 rotate(float low, float high, float cos, float sin) {
    return make_float2(low * cos - high * sin, high * cos + low * sin);
}
// Rotates two pairs: (a, a) and (b, b) if INTERLEAVED; otherwise `a` has the first columns of both pairs and `b` the second ones.
__device__ __forceinline__ void rotate_two(u32& a, u32& b, float2 cos, float2 sin) {
    const float2 first = rotate(low_of(a), INTERLEAVED ? high_of(a) : low_of(b), cos.x, sin.x);
    const float2 second = rotate(INTERLEAVED ? low_of(b) : high_of(a), high_of(b), cos.y, sin.y);
    a = INTERLEAVED ? to_bf16x2(first.x, first.y) : to_bf16x2(first.x, second.x);
    b = INTERLEAVED ? to_bf16x2(second.x, second.y) : to_bf16x2(first.y, second.y);
}

// Rotates four pairs, of which `low` has the first four columns and `high` the other four.
__device__ __forceinline__ void rotate_four(uint2& low, uint2& high, float4 cos, float4 sin) {
    rotate_two(low.x, INTERLEAVED ? low.y : high.x, make_float2(cos.x, cos.y), make_float2(sin.x, sin.y));
    rotate_two(INTERLEAVED ? high.x : low.y, high.y, make_float2(cos.z, cos.w), make_float2(sin.z, sin.w));
}

// Forces the compiler to compute an offset here, before the wait, and not where it is used.
__device__ __forceinline__ void compute_now(int& x) { asm volatile("" : "+r"(x)); }

struct Latents {  // of the tokens: RANK columns to norm, then ROPE to rotate
    const u16 *rows, *gain;
    const long long* slots;
    u16* cache;  // [slots][RANK + ROPE]
    int row_columns;
    float eps;
};

// Two bfloat16 numbers; zeros instead of NaN and infinity, because a masked key of another request must not spoil its output.
__device__ __forceinline__ u32 finite2(u32 v) {
    return ((v & 0x7F80) == 0x7F80 ? 0 : v & 0xFFFF) | ((v & 0x7F800000) == 0x7F800000 ? 0 : v & 0xFFFF0000);
}

// Norms and rotates the KV row of a token and stores it, by one block.
__device__ __forceinline__ void write_row(const Latents& latents, int token, const long long* positions, const float* cos_sin) {
    constexpr int NORMED = RANK / 4, EACH = (NORMED + THREADS - 1) / THREADS;  // pieces of four columns; of a thread
    constexpr int APART = INTERLEAVED ? 4 : ROPE / 2;                         // from the first four columns to rotate to the other four
    __shared__ float squares[WARPS];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, pairs = (INTERLEAVED ? 8 : 4) * threadIdx.x;
    const bool rotates = threadIdx.x < ROTATED_PIECES;
    const u16* const row = latents.rows + (long)token * latents.row_columns;
    u16* const to = latents.cache + latents.slots[token] * (RANK + ROPE);
    uint2 gain[EACH], x[EACH];
    #pragma unroll
    for (int k = 0; k < EACH; k++) {
        const int piece = k * THREADS + threadIdx.x;
        gain[k] = piece < NORMED ? *(const uint2*)(latents.gain + 4 * piece) : make_uint2(0, 0);
    }
    float4 cos = {}, sin = {};
    if (rotates) {
        const float* const angles = cos_sin + positions[token] * ROPE + 4 * threadIdx.x;
        cos = *(const float4*)angles, sin = *(const float4*)(angles + ROPE / 2);
    }
    if (EARLY) wait_for_previous();

    uint2 low = {}, high = {};
    if (rotates) low = *(const uint2*)(row + RANK + pairs), high = *(const uint2*)(row + RANK + pairs + APART);
    float sum = 0.0f;
    #pragma unroll
    for (int k = 0; k < EACH; k++) {
        const int piece = k * THREADS + threadIdx.x;
        x[k] = piece < NORMED ? *(const uint2*)(row + 4 * piece) : make_uint2(0, 0);
        sum += low_of(x[k].x) * low_of(x[k].x) + high_of(x[k].x) * high_of(x[k].x);
        sum += low_of(x[k].y) * low_of(x[k].y) + high_of(x[k].y) * high_of(x[k].y);
    }
    sum = sum_of_lanes<32>(sum);
    if (lane == 0) squares[warp] = sum;
    __syncthreads();
    sum = 0.0f;
    #pragma unroll
    for (int w = 0; w < WARPS; w++) sum += squares[w];
    const float factor = 1.0f / sqrtf(sum / RANK + latents.eps);
    const auto scaled = [&](u32 v, u32 by) {
        return finite2(to_bf16x2(low_of(v) * factor * low_of(by), high_of(v) * factor * high_of(by)));
    };
    #pragma unroll
    for (int k = 0; k < EACH; k++) {
        const int piece = k * THREADS + threadIdx.x;
        if (piece < NORMED) *(uint2*)(to + 4 * piece) = make_uint2(scaled(x[k].x, gain[k].x), scaled(x[k].y, gain[k].y));
    }
    if (!rotates) return;
    rotate_four(low, high, cos, sin);
    *(uint2*)(to + RANK + pairs) = make_uint2(finite2(low.x), finite2(low.y));
    *(uint2*)(to + RANK + pairs + APART) = make_uint2(finite2(high.x), finite2(high.y));
}

// Computes out [M, heads, RANK + ROPE] from q [M, heads, NOPE + ROPE] and key [heads, NOPE, RANK]. `q_token`, `q_head` and `key_head` are strides.
// A row of cos_sin has the cosines of ROPE / 2 angles, then their sines. Blocks: heads * PARTS, after M more with WRITES. Offsets must fit into
// 32 bits.
extern "C" __global__ void __launch_bounds__(THREADS, 8) absorb_queries(
    const u16* q, const u16* key, const long long* positions, const float* cos_sin, u16* out, int M, int q_token, int q_head, int key_head,
    const Latents latents
) {
    extern __shared__ __align__(128) u8 shared[];  // [NOPE][KEY_BYTES] keys; [TOKENS][TOKEN_BYTES] tokens
    u8* const tokens = shared + NOPE * KEY_BYTES;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int writing = WRITES ? M : 0, block = blockIdx.x - writing;
    const int head = block / PARTS, part = block % PARTS, out_token = (gridDim.x - writing) / PARTS * (RANK + ROPE);

    if (EARLY) launch_next();
    if (WRITES && block < 0) {
        write_row(latents, blockIdx.x, positions, cos_sin);
        return;
    }
    const int copied = threadIdx.x / KEY_PIECES, piece = threadIdx.x % KEY_PIECES;
    const u16* const from = key + (head * key_head + copied * RANK + part * COLUMNS + piece * 8);
    #pragma unroll
    for (int first = 0; first < NOPE; first += TOGETHER)
        copy16<128>(shared_address(shared) + (first + copied) * KEY_BYTES + place_of(first + copied, piece) * 16, from + first * RANK);
    commit_copies();
    const int rotated = threadIdx.x % TOKENS, four = part + threadIdx.x / TOKENS * PARTS;  // the token and the four pairs that this thread rotates
    const bool rotates = rotated < M && four < ROTATED_PIECES;
    float4 cos = {}, sin = {};
    if (rotates) {
        const float* const angles = cos_sin + positions[rotated] * ROPE + 4 * four;
        cos = *(const float4*)angles, sin = *(const float4*)(angles + ROPE / 2);
    }
    constexpr int NEXT = INTERLEAVED ? 4 : ROPE / 2;  // distance from the first four columns to the other four
    const int pairs = (INTERLEAVED ? 8 : 4) * four;
    int rotated_from = rotated * q_token + head * q_head + NOPE + pairs;
    int rotated_to = rotated * out_token + head * (RANK + ROPE) + RANK + pairs;
    int to = g * out_token + head * (RANK + ROPE) + part * COLUMNS + 16 * warp + 2 * t;
    compute_now(rotated_from), compute_now(rotated_to), compute_now(to);
    int token_from[COPIES], token_to[COPIES];
    #pragma unroll
    for (int k = 0; k < COPIES; k++) {
        const int i = k * THREADS + threadIdx.x, token = i / PIECES, at = i % PIECES;
        token_from[k] = token * q_token + head * q_head + at * 8;
        token_to[k] = token < M ? token * TOKEN_BYTES + at * 16 : -1;
        compute_now(token_from[k]), compute_now(token_to[k]);
    }
    if (EARLY) wait_for_previous();

    #pragma unroll
    for (int k = 0; k < COPIES; k++)
        if (token_to[k] >= 0) copy16<128>(shared_address(tokens) + token_to[k], q + token_from[k]);
    uint2 low = {}, high = {};
    if (rotates) low = *(const uint2*)(q + rotated_from), high = *(const uint2*)(q + rotated_from + NEXT);
    wait_copies();
    __syncthreads();

    // Matrices 0 and 1 have latent columns 0 to 7 and 8 to 15 of the warp, for the keys of columns 8 t and 8 t + 1; matrices 2 and 3 have them for
    // the next two keys.
    const int matrix = lane / 8, row = lane % 8, named = row / 2 * 8 + row % 2 + matrix / 2 * 2;
    const u32 fragment = shared_address(shared) + named * KEY_BYTES + place_of(named, 2 * warp + matrix % 2) * 16;
    const u8* own[TILES];
    #pragma unroll
    for (int n = 0; n < TILES; n++) own[n] = tokens + min(8 * n + g, M - 1) * TOKEN_BYTES + t * 16;
    float sums[2][TILES][4] = {};  // two independent accumulation chains
    #pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
        u32 first[4], second[4];
        load_transposed<2>(first, fragment + 32 * c * KEY_BYTES);
        load_transposed<2>(second, fragment + (32 * c + 4) * KEY_BYTES);
        #pragma unroll
        for (int n = 0; n < TILES; n++) {
            const uint4 v = *(const uint4*)(own[n] + 64 * c);
            mma_bf16(sums[0][n], first[0], first[1], first[2], first[3], v.x, v.y);
            mma_bf16(sums[1][n], second[0], second[1], second[2], second[3], v.z, v.w);
        }
    }
    #pragma unroll
    for (int n = 0; n < TILES; n++) {
        float (&sum)[4] = sums[0][n];
        #pragma unroll
        for (int i = 0; i < 4; i++) sum[i] += sums[1][n][i];
        const u32 left = transposed(to_bf16x2(sum[0], sum[1])), right = transposed(to_bf16x2(sum[2], sum[3]));
        u32* const at = (u32*)(out + (to + 8 * n * out_token));
        if (8 * n + g < M) at[0] = left, at[4] = right;
    }
    if (!rotates) return;
    rotate_four(low, high, cos, sin);
    *(uint2*)(out + rotated_to) = low, *(uint2*)(out + rotated_to + NEXT) = high;
}
