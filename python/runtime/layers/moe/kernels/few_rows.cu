// The experts of a sparse MLP for few tokens, in two kernels that read each weight of the experts hit once, by `fragments.cu`.
//
// Tokens of an expert lie side by side, eight to a tile.
//
// Constants from the host besides those of `fragments.cu`: TOP_K, WORDS (of a bit mask of experts), TOKENS (8, 16, 32 or 64: most tokens),
// BIAS, ADD, DEFER, FLOAT_OUT, UP_WARPS, DOWN_WARPS, BATCH (loads of a lane in flight, for each of two rows), TOKENS_EARLY (whether tokens
// are loaded beside the weights).

constexpr int TILES = 2;                                              // tiles of eight tokens of one pass over the weights
constexpr int EARLY_PIECES = TOKENS_EARLY ? LANE_COLUMNS / 8 : 0;      // of the first tile's tokens, loaded beside the weights
constexpr int HALVES = TOKENS <= 32 ? 1 : 2;                          // tokens of a lane when a warp looks at all of them

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
                    const int block = scale_block(w, column);
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
                multiply_piece(sums[n], ga, hb, FORMAT == 2 ? factor_a : scale_a[i], FORMAT == 2 ? factor_b : scale_b[i], tokens);
            }
        }
    }
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
