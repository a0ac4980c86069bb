// The experts of a sparse MLP for few tokens, in two kernels that read each weight of the experts hit once.
//
// Weights go straight from memory into the fragments of mma.m16n8k16: lane (g, t) of a warp loads 16 bytes of rows g and g + 8, which
// are LANE_COLUMNS neighbouring columns, and the same columns of token g. An instruction multiplies whichever 16 columns its lanes hold;
// as weights and tokens agree on the order, the sum over all columns is the same. Tokens of an expert lie side by side, eight to a tile.
//
// Constants from the host: FORMAT (0: bfloat16, 1: e4m3 with float32 scales, 2: e2m1 with a scale for 32 columns), ACT (0: SiLU,
// 1: clamped SwiGLU, 2: GELU), TOP_K, WORDS (of a bit mask of experts), TOKENS (8, 16, 32 or 64: most tokens), BIAS, EARLY, ADD,
// DEFER, FLOAT_OUT, UP_WARPS, DOWN_WARPS, BATCH (loads of a lane in flight, for each of two rows),
// TOKENS_EARLY (whether tokens are loaded beside the weights).

typedef unsigned char u8; typedef unsigned short u16; typedef unsigned int u32; typedef unsigned long long u64;

constexpr int LANE_COLUMNS = FORMAT == 0 ? 8 : FORMAT == 1 ? 16 : 32;  // in 16 bytes
constexpr int CHUNK = 4 * LANE_COLUMNS;                               // columns of one load of a warp
constexpr int TILES = 2;                                              // tiles of eight tokens of one pass over the weights
constexpr int EARLY_PIECES = TOKENS_EARLY ? LANE_COLUMNS / 8 : 0;      // of the first tile's tokens, loaded beside the weights
constexpr int HALVES = TOKENS <= 32 ? 1 : 2;                          // tokens of a lane when a warp looks at all of them

__device__ __forceinline__ uint4 stream16(const u8* at) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at));
    return v;
}

__device__ __forceinline__ float of_bf16(u16 bits) { return __uint_as_float((u32)bits << 16); }

__device__ __forceinline__ u16 to_bf16(float x) {
    u16 bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
}

__device__ __forceinline__ u32 multiply2(u32 a, u32 b) {
    u32 out;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
    return out;
}

__device__ __forceinline__ void mma(float (&sums)[4], u32 g_low, u32 h_low, u32 g_high, u32 h_high, u32 x_low, u32 x_high) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(g_low), "r"(h_low), "r"(g_high), "r"(h_high), "r"(x_low), "r"(x_high));
}

// Two bytes of e4m3 in the high halves of `t`'s 16-bit words: exponent and mantissa move to their places in bfloat16, and a
// multiplication by 2^120 mends the bias, of subnormal numbers too.
__device__ __forceinline__ u32 widen_e4m3(u32 t) { return multiply2((t >> 4 & 0x07F007F0) | (t & 0x80008000), 0x7B807B80); }

// Likewise two e2m1 numbers: in the low, or in the high four bits of those bytes. `factor` holds the scale times 2^126.
__device__ __forceinline__ u32 widen_low(u32 t, u32 factor) { return multiply2((t >> 2 & 0x01C001C0) | (t << 4 & 0x80008000), factor); }
__device__ __forceinline__ u32 widen_high(u32 t, u32 factor) { return multiply2((t >> 6 & 0x01C001C0) | (t & 0x80008000), factor); }

__device__ __forceinline__ u32 bytes01(u32 word) { return __byte_perm(word, 0, 0x1404); }
__device__ __forceinline__ u32 bytes23(u32 word) { return __byte_perm(word, 0, 0x3424); }

// The scale of an e2m1 group, 2^(s - 127), times 2^126, twice: a scale above 128 counts as 128.
__device__ __forceinline__ u32 group_factor(u8 s) { return ((u32)min((int)s, 128) + 126 << 7) * 0x00010001u; }

struct Weights {  // of one projection
    const u8* weight;
    const u8* scale;
    const u16* bias;
    int rows, columns;                                       // of one expert
    int expert_scales, row_scales, scale_rows, scale_columns;  // of e4m3
};

struct Row {  // one weight row of a lane
    const u8* at;
    const u8* scale;
};

__device__ __forceinline__ long row_bytes(int columns) { return FORMAT == 0 ? 2L * columns : FORMAT == 1 ? columns : columns / 2; }

__device__ __forceinline__ Row row_of(const Weights& w, int expert, int row) {
    const u8* at = w.weight + ((long)expert * w.rows + row) * row_bytes(w.columns);
    if (FORMAT == 1) return {at, w.scale + 4L * ((long)expert * w.expert_scales + (long)(row / w.scale_rows) * w.row_scales)};
    return {at, FORMAT == 2 ? w.scale + ((long)expert * w.rows + row) * (w.columns / 32) : nullptr};
}

// Eight columns of a token, zeros for none.
__device__ __forceinline__ uint4 piece_of(const u16* token, int column) {
    return token == nullptr ? make_uint4(0, 0, 0, 0) : *(const uint4*)(token + column);
}

// `sums += rows x tokens` over the chunks of 4 * LANE_COLUMNS columns from `first` to `end`. x: the lane's token of each tile, or null.
__device__ __forceinline__ void multiply(
    float (&sums)[TILES][4], const Weights& w, Row g, Row h, const u16* const (&x)[TILES], int tiles, int first, int end
) {
    const int t = threadIdx.x % 4;
    for (int chunk = first; chunk < end; chunk += BATCH) {
        uint4 a[BATCH], b[BATCH], early[BATCH][EARLY_PIECES + 1];
        u32 scale_a[BATCH], scale_b[BATCH];
        #pragma unroll
        for (int i = 0; i < BATCH; i++) {
            const int column = (chunk + i) * CHUNK + t * LANE_COLUMNS;
            const bool in = chunk + i < end && column < w.columns;
            a[i] = b[i] = make_uint4(0, 0, 0, 0);
            scale_a[i] = scale_b[i] = 0;
            #pragma unroll
            for (int j = 0; j < EARLY_PIECES; j++) early[i][j] = in ? piece_of(x[0], column + 8 * j) : make_uint4(0, 0, 0, 0);
            if (in) {
                a[i] = stream16(g.at + row_bytes(column));
                b[i] = stream16(h.at + row_bytes(column));
                if (FORMAT == 1) {
                    const int block = column / w.scale_columns;
                    scale_a[i] = ((const u32*)g.scale)[block];
                    scale_b[i] = ((const u32*)h.scale)[block];
                }
                if (FORMAT == 2) {
                    scale_a[i] = g.scale[column / 32];
                    scale_b[i] = h.scale[column / 32];
                }
            }
        }
        #pragma unroll
        for (int i = 0; i < BATCH; i++) {
            const int column = (chunk + i) * CHUNK + t * LANE_COLUMNS;
            const bool in = chunk + i < end && column < w.columns;
            const u32 ga[4] = {a[i].x, a[i].y, a[i].z, a[i].w}, hb[4] = {b[i].x, b[i].y, b[i].z, b[i].w};
            const u32 factor_a = FORMAT == 2 ? group_factor(scale_a[i]) : 0, factor_b = FORMAT == 2 ? group_factor(scale_b[i]) : 0;
            #pragma unroll
            for (int n = 0; n < TILES; n++) {
                if (n >= tiles) break;
                uint4 tokens[LANE_COLUMNS / 8];
                #pragma unroll
                for (int j = 0; j < LANE_COLUMNS / 8; j++)
                    tokens[j] = n == 0 && j < EARLY_PIECES ? early[i][j] : in ? piece_of(x[n], column + 8 * j) : make_uint4(0, 0, 0, 0);
                const u32* xs = (const u32*)tokens;
                if (FORMAT == 0) {
                    mma(sums[n], ga[0], hb[0], ga[1], hb[1], xs[0], xs[1]);
                    mma(sums[n], ga[2], hb[2], ga[3], hb[3], xs[2], xs[3]);
                } else if (FORMAT == 1) {
                    float part[4] = {0.0f, 0.0f, 0.0f, 0.0f};
                    #pragma unroll
                    for (int j = 0; j < 4; j++)
                        mma(part, widen_e4m3(bytes01(ga[j])), widen_e4m3(bytes01(hb[j])), widen_e4m3(bytes23(ga[j])),
                            widen_e4m3(bytes23(hb[j])), xs[2 * j], xs[2 * j + 1]);
                    const float s = __uint_as_float(__shfl_sync(~0u, scale_a[i], threadIdx.x % 32 & ~3));
                    const float u = __uint_as_float(__shfl_sync(~0u, scale_b[i], threadIdx.x % 32 & ~3));
                    sums[n][0] += part[0] * s; sums[n][1] += part[1] * s;
                    sums[n][2] += part[2] * u; sums[n][3] += part[3] * u;
                } else {
                    #pragma unroll
                    for (int j = 0; j < 4; j++) {
                        const u32 g01 = bytes01(ga[j]), g23 = bytes23(ga[j]), h01 = bytes01(hb[j]), h23 = bytes23(hb[j]);
                        mma(sums[n], widen_low(g01, factor_a), widen_low(h01, factor_b), widen_low(g23, factor_a), widen_low(h23, factor_b),
                            xs[2 * j], xs[2 * j + 1]);
                        mma(sums[n], widen_high(g01, factor_a), widen_high(h01, factor_b), widen_high(g23, factor_a),
                            widen_high(h23, factor_b), xs[8 + 2 * j], xs[8 + 2 * j + 1]);
                    }
                }
            }
        }
    }
}

__device__ __forceinline__ void wait_for_previous() {
    if (EARLY) asm volatile("griddepcontrol.launch_dependents;\ngriddepcontrol.wait;" ::: "memory");
}

__device__ __forceinline__ float activate(float gate, float up, float alpha, float limit) {
    if (ACT == 1) {
        gate = fminf(gate, limit);
        up = fminf(fmaxf(up, -limit), limit);
        return gate / (1.0f + __expf(-alpha * gate)) * (up + 1.0f);
    }
    const float inner = ACT == 2 ? 1.5957691216057308f * (gate + 0.044715f * gate * gate * gate) : gate;
    return gate / (1.0f + __expf(-inner)) * up;
}

struct Routing {
    const int* ids;        // [T, TOP_K]
    const float* weights;  // [T, TOP_K]
    const u32* masks;      // [T, WORDS]
    int first, experts;    // ids of this process: first to first + experts
};

// h[pair] = weight * activation(gate(x), up(x)) for `tiles` times 8 inner columns of one expert. `plan` gets the number of experts hit,
// then for each: its index, its tokens, and their pairs [TOKENS].
extern "C" __global__ void __launch_bounds__(32 * UP_WARPS) experts_up(
    const u16* x, Weights w, Routing routing, u16* h, int* plan, int T, int tiles, int blocks_of_expert, float alpha, float limit
) {
    __shared__ int own[UP_WARPS][TOKENS];
    __shared__ float own_weight[UP_WARPS][TOKENS];
    __shared__ float parts[2][UP_WARPS][TILES][4][32];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int slot = blockIdx.x / blocks_of_expert, block = blockIdx.x % blocks_of_expert;
    wait_for_previous();
    int ids[HALVES][TOP_K];
    u32 words[WORDS];
    #pragma unroll
    for (int half = 0; half < HALVES; half++)
        #pragma unroll
        for (int j = 0; j < TOP_K; j++) {
            const int token = half * 32 + lane;
            ids[half][j] = token < T ? routing.ids[token * TOP_K + j] - routing.first : -1;
        }
    #pragma unroll
    for (int i = 0; i < WORDS; i++) {
        words[i] = 0;
        #pragma unroll
        for (int half = 0; half < HALVES; half++)
            if (half * 32 + lane < T) words[i] |= routing.masks[(half * 32 + lane) * WORDS + i];
    }
    int expert = -1, hit = 0;
    #pragma unroll
    for (int i = 0; i < WORDS; i++) {
        u32 word = __reduce_or_sync(~0u, words[i]);
        const int below = routing.first - 32 * i, above = routing.first + routing.experts - 32 * i;  // bits of this process
        word = below >= 32 || above <= 0 ? 0 : word & (below > 0 ? ~0u << below : ~0u) & (above < 32 ? (1u << above) - 1 : ~0u);
        const int count = __popc(word);
        if (slot >= hit && slot < hit + count) expert = 32 * i + (int)__fns(word, 0, slot - hit + 1) - routing.first;
        hit += count;
    }
    if (block == 0 && slot == 0 && threadIdx.x == 0) plan[0] = hit;
    if (expert < 0) return;

    int tokens = 0, place[HALVES];
    float weight[HALVES];
    #pragma unroll
    for (int half = 0; half < HALVES; half++) {
        int pair = -1;
        #pragma unroll
        for (int j = 0; j < TOP_K; j++)
            if (ids[half][j] == expert) pair = (half * 32 + lane) * TOP_K + j;
        const u32 routed = __ballot_sync(~0u, pair >= 0);
        place[half] = pair >= 0 ? tokens + __popc(routed & (1u << lane) - 1) : -1;
        weight[half] = pair >= 0 ? routing.weights[pair] : 0.0f;
        if (pair >= 0) own[warp][place[half]] = pair;
        tokens += __popc(routed);
    }
    __syncwarp();
    if (block == 0 && warp == 0) {
        int* entry = plan + 1 + slot * (TOKENS + 2);
        if (lane == 0) entry[0] = expert, entry[1] = tokens;
        for (int i = lane; i < tokens; i += 32) entry[2 + i] = own[0][i];
    }

    const int g = lane / 4, t = lane % 4, inner = w.rows / 2, chunks = (w.columns + CHUNK - 1) / CHUNK;
    const int share = (chunks + UP_WARPS - 1) / UP_WARPS;
    int buffer = 0;
    for (int tile = block * tiles; tile < min((block + 1) * tiles, inner / 8); tile++) {
        const int column = tile * 8 + g;
        const Row gate_row = row_of(w, expert, column), up_row = row_of(w, expert, inner + column);
        const float gate_bias = BIAS ? of_bf16(w.bias[(long)expert * w.rows + column]) : 0.0f;
        const float up_bias = BIAS ? of_bf16(w.bias[(long)expert * w.rows + inner + column]) : 0.0f;
        for (int base = 0; base < tokens; base += 8 * TILES, buffer ^= 1) {
            const u16* rows[TILES];
            float sums[TILES][4] = {};
            #pragma unroll
            for (int n = 0; n < TILES; n++)
                rows[n] = base + 8 * n + g < tokens ? x + (long)(own[warp][base + 8 * n + g] / TOP_K) * w.columns : nullptr;
            const int used = (min(tokens - base, 8 * TILES) + 7) / 8;
            multiply(sums, w, gate_row, up_row, rows, used, warp * share, min(chunks, (warp + 1) * share));
            #pragma unroll
            for (int half = 0; half < HALVES; half++)
                if (place[half] >= 0) own_weight[warp][place[half]] = weight[half];
            #pragma unroll
            for (int n = 0; n < TILES; n++)
                #pragma unroll
                for (int i = 0; i < 4; i++)
                    if (n < used) parts[buffer][warp][n][i][lane] = sums[n][i];
            __syncthreads();  // the next pass writes the other buffer
            for (int i = threadIdx.x; i < used * 64; i += 32 * UP_WARPS) {
                const int n = i / 64, odd = i / 32 % 2, token = base + 8 * n + 2 * t + odd;  // i % 32 is this thread's lane
                float gate = gate_bias, up = up_bias;
                #pragma unroll
                for (int k = 0; k < UP_WARPS; k++) gate += parts[buffer][k][n][odd][lane], up += parts[buffer][k][n][2 + odd][lane];
                if (token < tokens)
                    h[(long)own[warp][token] * inner + column] = to_bf16(activate(gate, up, alpha, limit) * own_weight[warp][token]);
            }
        }
    }
}

// What a warp of the second kernel knows of an expert before it reads its weights.
struct Entry {
    int expert, tokens, pairs[TILES];
};

__device__ __forceinline__ Entry entry_of(const int* plan, int slot, int g) {
    const int* at = plan + 1 + slot * (TOKENS + 2);
    Entry entry = {at[0], at[1], {}};
    #pragma unroll
    for (int n = 0; n < TILES; n++) entry.pairs[n] = 8 * n < TOKENS ? at[2 + 8 * n + g] : 0;
    return entry;
}

// out[token] (+)= the sum over the experts hit of down(h[pair]), for 16 outputs. With DEFER also out * gain, and sums of squares.
extern "C" __global__ void __launch_bounds__(32 * DOWN_WARPS) experts_down(
    const u16* h, Weights w, Routing routing, const int* plan, void* out, const u16* gain, u16* scaled, float* squares, int T, int slots,
    int pieces
) {
    extern __shared__ float sums_of_warps[];  // [DOWN_WARPS][16][TOKENS]
    constexpr int THREADS = 32 * DOWN_WARPS, OUTPUTS = (16 * TOKENS + THREADS - 1) / THREADS;  // of a thread
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, first_row = blockIdx.x * 16;
    float* mine = sums_of_warps + warp * 16 * TOKENS;
    for (int i = lane; i < 16 * TOKENS; i += 32) mine[i] = 0.0f;
    wait_for_previous();
    float before[OUTPUTS];
    #pragma unroll
    for (int k = 0; k < OUTPUTS; k++) {
        const int i = k * THREADS + threadIdx.x;
        const long at = (long)(i / 16) * w.rows + first_row + i % 16;
        before[k] = ADD && i < 16 * T ? FLOAT_OUT ? ((const float*)out)[at] : of_bf16(((const u16*)out)[at]) : 0.0f;
    }
    const int chunks = (w.columns + CHUNK - 1) / CHUNK, share = (chunks + pieces - 1) / pieces, items = plan[0] * pieces;
    Entry next = entry_of(plan, min(warp / pieces, slots - 1), g);
    __syncwarp();
    for (int item = warp; item < items; item += DOWN_WARPS) {
        const Entry entry = next;
        next = entry_of(plan, min((item + DOWN_WARPS) / pieces, slots - 1), g);
        const int* pairs = plan + 1 + item / pieces * (TOKENS + 2) + 2;
        const int piece = item % pieces;
        const Row low = row_of(w, entry.expert, first_row + g), high = row_of(w, entry.expert, first_row + 8 + g);
        for (int base = 0; base < entry.tokens; base += 8 * TILES) {
            const u16* rows[TILES];
            float sums[TILES][4] = {};
            #pragma unroll
            for (int n = 0; n < TILES; n++) {
                const bool in = base + 8 * n + g < entry.tokens;
                rows[n] = in ? h + (long)(base == 0 ? entry.pairs[n] : pairs[base + 8 * n + g]) * w.columns : nullptr;
            }
            const int used = (min(entry.tokens - base, 8 * TILES) + 7) / 8;
            multiply(sums, w, low, high, rows, used, piece * share, min(chunks, (piece + 1) * share));
            #pragma unroll
            for (int n = 0; n < TILES; n++)
                #pragma unroll
                for (int odd = 0; odd < 2; odd++) {
                    const int token = base + 8 * n + 2 * t + odd;
                    if (token < entry.tokens) {
                        const int column = pairs[token] / TOP_K;
                        mine[g * TOKENS + column] += sums[n][odd];
                        mine[(g + 8) * TOKENS + column] += sums[n][2 + odd];
                    }
                }
        }
        __syncwarp();  // another lane may hold the same token in the next item
    }
    __syncthreads();
    #pragma unroll
    for (int k = 0; k < OUTPUTS; k++) {
        const int i = k * THREADS + threadIdx.x, row = i % 16, token = i / 16, column = first_row + row;
        if (i >= 16 * TOKENS) break;  // whole warps
        const bool in = token < T;
        const long at = (long)token * w.rows + column;
        float sum = before[k];
        #pragma unroll
        for (int other = 0; other < DOWN_WARPS; other++) sum += sums_of_warps[(other * 16 + row) * TOKENS + token];
        if (in) {
            if (BIAS)
                for (int j = 0; j < TOP_K; j++) {
                    const int expert = routing.ids[token * TOP_K + j] - routing.first;
                    if (expert >= 0 && expert < routing.experts)
                        sum += routing.weights[token * TOP_K + j] * of_bf16(w.bias[(long)expert * w.rows + column]);
                }
            if (FLOAT_OUT) ((float*)out)[at] = sum;
            else ((u16*)out)[at] = to_bf16(sum);
        }
        if (DEFER) {
            float square = sum * sum;
            if (in) scaled[at] = to_bf16(sum * of_bf16(gain[column]));
            #pragma unroll
            for (int apart = 8; apart > 0; apart /= 2) square += __shfl_xor_sync(~0u, square, apart);
            if (in && row == 0) squares[(long)token * gridDim.x + blockIdx.x] = square;
        }
    }
}
