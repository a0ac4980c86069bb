// Routing for few tokens: the router's GEMM, the scores and the selection of experts, in a cluster of blocks for up to PASS tokens.
//
// PARTS blocks split the columns of 16 * OWN experts, and the warps of a block split its columns. Weights do not depend on the preceding
// kernel: the first HELD chunks of each row are loaded while that kernel still runs. Small shares go to registers, because a block with
// little shared memory fits on an SM together with most kernels. Large shares go to a ring in shared memory; chunks that do not fit yet are
// prefetched into L2. Tokens pass through shared memory, normed and in rounds, into the fragments of mma.m16n8k16. The sums of the warps are
// added in shared memory and sent to the block that selects for a token. Its mbarrier counts the bytes, so the cluster needs no final
// barrier: a block that expects nothing ends after sending. One warp per token selects the experts.
//
// Constants from the host besides those of `fragments.cu`: EXPERTS, COLUMNS, TOP_K, SHARED (1: expert EXPERTS follows the chosen ones, by weight
// 1; otherwise 0), SCORING (0: softmax, 1: sigmoid, 2: softmax of the chosen), RENORMALIZE, BIAS, CORRECTION, NORM, WARPS, CLUSTER, PARTS, OWN,
// SHARE (chunks of a warp), HELD, RING (whether they are held in shared memory), ROUND (chunks of a token that are there at once), TOKEN_BYTES
// (of a warp's shared memory, for each token).

constexpr int PASS = 8, THREADS = 32 * WARPS;
constexpr int SETS = CLUSTER / PARTS, ROWS = 16 * OWN;                      // blocks of a set have the same experts, ROWS of them
constexpr int CHUNKS = (COLUMNS + CHUNK - 1) / CHUNK;
constexpr bool EVEN = CHUNKS == PARTS * WARPS * SHARE;                       // whether each warp has SHARE chunks
constexpr bool WHOLE = COLUMNS % CHUNK == 0;
constexpr bool FULL = EXPERTS == SETS * ROWS;
constexpr int ROUNDS = (SHARE + ROUND - 1) / ROUND, PIECES = 4 * ROUND;     // 16-byte pieces of a token in a round
constexpr int STRIDE = 64 * (ROUND | 1);                                    // bytes of a token: adjacent tokens are in different banks
constexpr int SUMS = ROWS + 4;                                              // sums of a token, likewise
constexpr int QUADS = ROWS / 4;
constexpr int CHAINS = RING ? 2 : OWN < 4 ? 4 / OWN : 1;                              // sums of a lane that do not wait for each other
constexpr int UNROLL = RING ? 2 : ROUND;
constexpr int EACH = (EXPERTS + 31) / 32;                                   // neighbouring experts of a lane that chooses
constexpr int ALL = TOP_K + SHARED, WORDS = (EXPERTS + SHARED + 31) / 32;   // experts of a token; words of its mask
constexpr int WIDTH = SETS * ROWS > 32 * EACH ? SETS * ROWS : 32 * EACH;
constexpr int SLOTS = (PASS + CLUSTER - 1) / CLUSTER;                       // tokens that a block chooses for, at most
constexpr int SQUARES = 8;                                                  // that a lane loads at once
constexpr float LEAST = -3e38f;                                             // the score to choose by where it is NaN or less
static_assert(ALL <= 32 && WORDS <= 32, "a lane stores each");
static_assert(WARPS == PASS, "each warp sums the squares of a token");
static_assert(TOKEN_BYTES >= STRIDE && TOKEN_BYTES >= 4 * SUMS && TOKEN_BYTES % 16 == 0, "a warp's tokens give way to its sums");
static_assert(RING || (HELD == SHARE && ROUND == SHARE), "registers hold all weights");

struct Fragment {
    uint4 low, high;  // of rows g and g + 8
};

struct Choice {
    int expert;
    float score;
};

__device__ __forceinline__ u32 scaled2(u32 v, float scale) {
    return to_bf16x2(__uint_as_float(v << 16) * scale, __uint_as_float(v & 0xFFFF0000u) * scale);
}

// Integers in the order of floats; both zeros are equal, and 0 is below all numbers except NaN.
__device__ __forceinline__ u32 key_of(float x) {
    const u32 bits = __float_as_uint(x + 0.0f);
    return bits ^ ((u32)((int)bits >> 31) | 0x80000000u);
}
__device__ __forceinline__ float of_key(u32 key) { return __uint_as_float(key ^ (key >> 31 ? 0x80000000u : ~0u)); }

// The compiler leaves this load before the wait for the preceding kernel, but not one by `ld.global.nc`. Zeros where it is not `in`.
__device__ __forceinline__ uint4 load16(const u16* at, bool in) {
    uint4 v = make_uint4(0, 0, 0, 0);
    if (in)
        asm volatile("ld.global.L1::no_allocate.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4];"
            : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at) : "memory");
    return v;
}

// The experts and weights of one token, by one warp: each lane has EACH adjacent experts. Of equal scores, the smaller expert comes first.
__device__ __forceinline__ void choose(
    const float (&logits)[PARTS][WIDTH], const float* corrections, Choice (&chosen)[TOP_K], int* ids, float* weights, u32* masks,
    float scaling
) {
    const int lane = threadIdx.x % 32, first = lane * EACH;
    float score[EACH];
    u32 key[EACH];
    #pragma unroll
    for (int j = 0; j < EACH; j++) {
        score[j] = 0.0f;
        #pragma unroll
        for (int p = 0; p < PARTS; p++) score[j] += logits[p][first + j];
        if (first + j >= EXPERTS) score[j] = -__int_as_float(0x7F800000);
    }
    float total = 0.0f;
    bool none = false;  // whether softmax gives NaN to all experts
    if (SCORING == 0) {
        u32 best = 0;
        #pragma unroll
        for (int j = 0; j < EACH; j++) best = max(best, key_of(score[j]));
        const float top = of_key(__reduce_max_sync(~0u, best));
        #pragma unroll
        for (int j = 0; j < EACH; j++) {
            score[j] = __expf(score[j] - top);
            total += score[j];
            none |= score[j] != score[j];
        }
        none = __any_sync(~0u, none);
    }
    if (SCORING == 1) {
        #pragma unroll
        for (int j = 0; j < EACH; j++) score[j] = __fdividef(1.0f, 1.0f + __expf(-score[j]));
    }
    constexpr bool DIVIDED = SCORING == 0 && CORRECTION;  // whether softmax is complete before the choice; otherwise its sum runs along
    if (DIVIDED) {
        #pragma unroll
        for (int apart = 1; apart < 32; apart *= 2) total += __shfl_xor_sync(~0u, total, apart);
        #pragma unroll
        for (int j = 0; j < EACH; j++) score[j] = __fdividef(score[j], total);
    }
    #pragma unroll
    for (int j = 0; j < EACH; j++) {
        const float choice = CORRECTION && first + j < EXPERTS ? score[j] + corrections[first + j] : score[j];
        key[j] = first + j >= EXPERTS ? 0 : key_of(choice > LEAST && !none ? choice : LEAST);
    }
    u32 taken = 0;
    #pragma unroll
    for (int place = 0; place < TOP_K || place < 5; place++) {
        if (SCORING == 0 && !DIVIDED && place < 5) total += __shfl_xor_sync(~0u, total, 1 << place);
        if (place >= TOP_K) continue;
        u32 best = 0;
        #pragma unroll
        for (int j = 0; j < EACH; j++) best = max(best, key[j]);
        const u32 top = __reduce_max_sync(~0u, best);
        const u32 equals = __ballot_sync(~0u, best == top);
        const bool own = best == top && (equals & ((1u << lane) - 1)) == 0;
        int at = 0;
        float value = score[0];
        #pragma unroll
        for (int j = EACH - 1; j >= 0; j--)
            if (key[j] == top) at = j, value = score[j];
        if (own) {
            chosen[place] = {first + at, value};
            taken |= 1u << at;
        }
        #pragma unroll
        for (int j = 0; j < EACH; j++)
            if (own && at == j) key[j] = 0;
    }
    u32 word = 0;  // of this lane
    #pragma unroll
    for (int w = 0; w < EACH; w++) {
        const int at = first - 32 * w;
        const u32 bits = at >= 32 || at <= -32 ? 0 : at >= 0 ? taken << at : taken >> -at;
        const u32 all = __reduce_or_sync(~0u, bits);
        if (lane == w) word = all;
    }
    __syncwarp();
    const float factor = SCORING == 0 && !DIVIDED ? __fdividef(1.0f, total) : 1.0f;
    float sum = 0.0f;
    #pragma unroll
    for (int place = 0; place < TOP_K; place++)
        sum += SCORING == 2 ? __expf(chosen[place].score - chosen[0].score) : factor * chosen[place].score;
    if (lane < TOP_K) {
        const Choice choice = chosen[lane];
        float weight = SCORING == 2 ? __fdividef(__expf(choice.score - chosen[0].score), sum) : factor * choice.score;
        if (SCORING != 2 && RENORMALIZE) weight = __fdividef(weight, sum + 1e-20f);
        ids[lane] = choice.expert;
        weights[lane] = weight * scaling;
    }
    if (SHARED && lane == TOP_K) ids[TOP_K] = EXPERTS, weights[TOP_K] = 1.0f;
    if (SHARED && lane == EXPERTS / 32) word |= 1u << EXPERTS % 32;
    if (lane < WORDS) masks[lane] = word;
}

// normed = x times the scale of `norms`, written where NORM; the routing of those T tokens. `bias` and `correction`: [EXPERTS].
extern "C" __global__ void __launch_bounds__(THREADS, 2) route_few(
    const u16* x, const u16* weight, const u16* bias, const float* correction, Norms norms, u16* normed, int* ids, float* weights,
    u32* masks, int T, float scaling
) {
    extern __shared__ __align__(128) u8 shared[];  // RING: [WARPS][HELD][OWN][2][32] pieces of weights; [WARPS][tokens][TOKEN_BYTES]
    __shared__ __align__(16) float logits[SLOTS][PARTS][WIDTH];
    __shared__ float corrections[EXPERTS], scales[PASS];
    __shared__ Choice chosen[SLOTS][TOP_K];
    __shared__ u64 arrived[SLOTS];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int block = blockIdx.x % CLUSTER, part = block % PARTS, set = block / PARTS;
    const int first_token = blockIdx.x / CLUSTER * PASS, tokens = min(T - first_token, PASS);
    const int begin = (part * WARPS + warp) * SHARE, end = EVEN ? begin + SHARE : min(begin + SHARE, CHUNKS), expert = set * ROWS + g;

    if (EARLY) launch_next();
    if (threadIdx.x == 0)
        for (int slot = 0; slot < SLOTS; slot++) {
            const u32 barrier = shared_address(&arrived[slot]);
            barrier_init(barrier, 1), publish_barriers(), barrier_expect(barrier, PARTS * SETS * ROWS * sizeof(float));
        }
    cluster_arrive();
    u8* const ring = shared + (RING ? warp * HELD * OWN * 1024 + lane * 16 : 0);  // of this lane: two pieces of each tile and chunk
    u8* const all_tokens = shared + (RING ? WARPS * HELD * OWN * 1024 : 0);
    const u16* const own_weights = weight + (long)expert * COLUMNS + begin * CHUNK + t * LANE_COLUMNS;
    const auto inside = [&](int chunk, int piece) {
        return begin + chunk < end && (WHOLE || (begin + chunk) * CHUNK + piece * LANE_COLUMNS < COLUMNS);
    };
    const auto copy_chunk = [&](int chunk) {
        u8* const to = ring + chunk % HELD * (OWN * 1024);
        const bool in = inside(chunk, t);
        #pragma unroll
        for (int o = 0; o < OWN; o++) {
            const u16* const at = own_weights + 16 * o * COLUMNS + chunk * CHUNK;
            copy16<256>(shared_address(to + 1024 * o), at, in && (FULL || expert + 16 * o < EXPERTS));
            copy16<256>(shared_address(to + 1024 * o + 512), at + 8 * COLUMNS, in && (FULL || expert + 16 * o + 8 < EXPERTS));
        }
        commit_copies();
    };
    if (CORRECTION && warp == 0)
        for (int i = lane; i < EXPERTS; i += 32) copy<4>(shared_address(corrections + i), correction + i);
    Fragment held[RING ? 1 : HELD][OWN];
    #pragma unroll
    for (int i = 0; i < HELD; i++) {
        #pragma unroll
        for (int o = 0; o < OWN && !RING; o++) {
            const u16* const at = own_weights + 16 * o * COLUMNS + i * CHUNK;
            held[i][o].low = load16(at, inside(i, t) && (FULL || expert + 16 * o < EXPERTS));
            held[i][o].high = load16(at + 8 * COLUMNS, inside(i, t) && (FULL || expert + 16 * o + 8 < EXPERTS));
        }
        if (RING) copy_chunk(i);
    }
    if (SHARE > HELD && begin + HELD < end) {
        const int from = (begin + HELD) * CHUNK, to = min(end * CHUNK, COLUMNS);
        for (int row = set * ROWS + lane; row < min((set + 1) * ROWS, EXPERTS); row += 32)
            prefetch_bulk(weight + (long)row * COLUMNS + from, (to - from) * sizeof(u16));
    }
    const int quad = threadIdx.x % QUADS;
    u16 biases[4] = {};
    if (BIAS && part == 0)
        #pragma unroll
        for (int j = 0; j < 4; j++)
            if (FULL || set * ROWS + 4 * quad + j < EXPERTS) biases[j] = bias[set * ROWS + 4 * quad + j];
    if (EARLY) wait_for_previous();

    // A lane takes piece `lane` of the tokens' pieces, then each 32nd.
    const int count = tokens * PIECES;
    const long corner = (long)first_token * COLUMNS + begin * CHUNK;
    uint4 pieces[ROUND];
    const auto load_pieces = [&](int first) {
        #pragma unroll
        for (int k = 0; k < ROUND; k++) {
            if (32 * k >= count) break;  // whole warps
            const int i = 32 * k + lane, piece = i % PIECES;
            pieces[k] = make_uint4(0, 0, 0, 0);
            if (i < count && inside(first + piece / 4, piece % 4))
                pieces[k] = *(const uint4*)(x + corner + (i / PIECES * COLUMNS + first * CHUNK + piece * LANE_COLUMNS));
        }
    };
    load_pieces(0);
    if (NORM && warp < tokens) {
        const float* const squares = norms.squares + (long)(first_token + warp) * norms.parts;
        float sum = 0.0f;
        #pragma unroll 1
        for (int base = lane; base - lane < norms.parts; base += 32 * SQUARES) {
            float v[SQUARES];
            #pragma unroll
            for (int q = 0; q < SQUARES; q++) v[q] = base + 32 * q < norms.parts ? squares[base + 32 * q] : 0.0f;
            #pragma unroll
            for (int q = 0; q < SQUARES; q++) sum += v[q];
        }
        sum = sum_of_lanes<32>(sum);
        if (lane == 0) scales[warp] = rsqrtf(sum * (1.0f / COLUMNS) + norms.eps);
    }
    cluster_wait();  // all blocks have started
    if (NORM) __syncthreads();

    u8* const own = all_tokens + warp * tokens * TOKEN_BYTES;
    float sums[OWN][CHAINS][4] = {};
    #pragma unroll 1
    for (int first = 0; first < SHARE; first += ROUND) {
        #pragma unroll
        for (int k = 0; k < ROUND; k++) {
            if (32 * k >= count) break;
            const int i = 32 * k + lane, token = i / PIECES, piece = i % PIECES, chunk = first + piece / 4;
            if (i >= count) break;  // in the last turn
            uint4 v = pieces[k];
            if (NORM) {
                const float scale = scales[token];
                v = make_uint4(scaled2(v.x, scale), scaled2(v.y, scale), scaled2(v.z, scale), scaled2(v.w, scale));
                if (chunk % SETS == set && inside(chunk, piece % 4))
                    store16(normed + corner + (token * COLUMNS + first * CHUNK + piece * LANE_COLUMNS), v);
            }
            *(uint4*)(own + token * STRIDE + 16 * piece) = v;
        }
        __syncwarp();
        if (ROUNDS > 1) load_pieces(first + ROUND);
        const u8* const from = own + min(g, tokens - 1) * STRIDE + 16 * t;
        #pragma unroll UNROLL
        for (int c = 0; c < ROUND; c++) {
            const uint4 token = *(const uint4*)(from + 64 * c);
            if (RING) wait_copies<HELD - 1>();
            #pragma unroll
            for (int o = 0; o < OWN; o++) {
                const u8* const slot = ring + (first + c) % HELD * (OWN * 1024) + 1024 * o;
                const Fragment f = RING ? Fragment{*(const uint4*)slot, *(const uint4*)(slot + 512)} : held[RING ? 0 : c][o];
                mma(sums[o][2 * c % CHAINS], f.low.x, f.high.x, f.low.y, f.high.y, token.x, token.y);
                mma(sums[o][(2 * c + 1) % CHAINS], f.low.z, f.high.z, f.low.w, f.high.w, token.z, token.w);
            }
            if (RING && SHARE > HELD) copy_chunk(first + c + HELD);  // over what this lane has just read
            if (RING && SHARE == HELD) commit_copies();              // an empty group, so that `wait_copies` counts as with copies
        }
        __syncwarp();
    }
    #pragma unroll
    for (int o = 0; o < OWN; o++) {
        #pragma unroll
        for (int i = 0; i < 4; i++) {
            #pragma unroll
            for (int chain = 1; chain < CHAINS; chain++) sums[o][0][i] += sums[o][chain][i];
            const int token = 2 * t + i % 2;
            if (token < tokens) ((float*)own)[token * SUMS + 16 * o + g + i / 2 * 8] = sums[o][0][i];
        }
    }
    if (RING || (CORRECTION && warp == 0)) wait_copies();
    __syncthreads();
    const int token = threadIdx.x / QUADS;
    if (token < tokens) {
        float4 sum = make_float4(of_bf16(biases[0]), of_bf16(biases[1]), of_bf16(biases[2]), of_bf16(biases[3]));
        #pragma unroll
        for (int w = 0; w < WARPS; w++) {
            const float4 v = *(const float4*)(all_tokens + w * tokens * TOKEN_BYTES + 4 * (token * SUMS + 4 * quad));
            sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
        }
        const int slot = token / CLUSTER;
        send(token % CLUSTER, shared_address(&logits[slot][part][set * ROWS + 4 * quad]), shared_address(&arrived[slot]), sum);
    }
    const int chosen_token = block + warp * CLUSTER;
    if (warp >= SLOTS || chosen_token >= tokens) return;
    barrier_wait_first(shared_address(&arrived[warp]));
    const long row = first_token + chosen_token;
    choose(logits[warp], corrections, chosen[warp], ids + row * ALL, weights + row * ALL, masks + row * WORDS, scaling);
}
