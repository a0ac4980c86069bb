// The second GEMM of a sparse MLP for few tokens, with the sum over each token's experts:
// out[token] (+)= sum over its experts of (down projection x h[pair]), for the pairs that this process computes.
//
// A cluster of BLOCKS blocks computes TILES times 16 columns of `out` for all tokens. A unit of work is an expert and up to PASS of its tokens;
// tokens that are not in the unit are multiplied as zeros, which costs nothing. The concatenated columns of all units are split into stages, and
// each warp of a tile computes consecutive stages. So each weight is read once, unless its expert has more than PASS tokens, and no other kernel
// is needed for the sums.
//
// A stage has space for its weights and for the columns of its tokens. The first DEPTH stages of weights are prefetched before h is ready. A warp
// converts the tokens of each stage to float16 separately: each token is scaled by the power of two for its largest entry in this stage.
//
// Constants from the host, in addition to those of `stages.cu`: TOP_K, WARPS, DEPTH, TILES, BLOCKS, REGISTERS (most per thread), ADD, DEFER,
// FLOAT_OUT, BIAS.

constexpr int ROWS = 16, PASS = 4, THREADS = 32 * WARPS;
constexpr int TILE_WARPS = WARPS / TILES;                                // warps of a block per tile
constexpr int PIECES = STAGE_COLUMNS / 8, AT_ONCE = 32 / PIECES;         // 16-byte pieces of a token in a stage; tokens that a warp copies at once
constexpr int TOKEN_BYTES = 16 * PIECES + TOKEN_PADDING;
constexpr int TOKENS = 8, STRIDE = ROWS + 4, COUNT = TOKENS * TILES * ROWS;
static_assert(COUNT <= THREADS && TOKENS * STRIDE * 4 <= STAGE_BYTES, "a thread finishes one entry; sums take the place of a stage");
static_assert(WARPS % TILES == 0, "each tile has as many warps");

__device__ __forceinline__ u32 without_lowest(u32 bits, int count) {
    #pragma unroll
    for (int i = 0; i < PASS; i++)
        if (i < count) bits &= bits - 1;
    return bits;
}

struct Entry {  // the entry of `out` that a thread completes
    int token, column;
};
__device__ __forceinline__ Entry entry_of(int thread, int first_row) { return {thread / (TILES * ROWS), first_row + thread % (TILES * ROWS)}; }

// h: [T * TOP_K, inner] bfloat16, already multiplied by the routing weights of the pairs. T * TOP_K <= 32.
extern "C" __global__ void __maxnreg__(REGISTERS) down_sums(
    const u16* h, Weights w, Routing routing, void* out, const u16* gain, u16* scaled, float* squares, int T
) {
    extern __shared__ __align__(128) u8 shared[];  // [WARPS][DEPTH] stages; reused for the sums of each warp
    __shared__ uint4 zeros[PIECES];                // columns of a token that is not in the unit
    __shared__ __align__(8) float factors[WARPS][TOKENS];  // they undo the scaling to float16
    __shared__ __align__(16) float sent[BLOCKS > 1 ? BLOCKS - 1 : 1][BLOCKS > 1 ? COUNT : 4];  // the sums of the other blocks
    __shared__ u16 gains[TILES * ROWS];
    __shared__ u64 arrived;
    const u32 arrived_at = shared_address(&arrived);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int hidden = w.rows, inner = w.columns, count = T * TOP_K;
    const int rank = blockIdx.x % BLOCKS, first_row = blockIdx.x / BLOCKS * (TILES * ROWS), own_row = first_row + warp % TILES * ROWS;
    if (EARLY) launch_next();
    if (BLOCKS > 1) {
        if (rank == 0 && threadIdx.x == 0)
            barrier_init(arrived_at, 1), publish_barriers(), barrier_expect(arrived_at, (BLOCKS - 1) * T * TILES * ROWS * 4);
        cluster_arrive();
    }
    // As in the preceding kernel, every warp finds the experts itself. That kernel launches this one once the routing is known.
    const int id = lane < count ? routing.ids[lane] - routing.first : -1;
    const bool held = id >= 0 && id < routing.experts;
    const u32 alike = __match_any_sync(~0u, held ? id : -1), from_here = alike >> lane << lane;
    const u32 own_unit = from_here ^ without_lowest(from_here, PASS);  // the pairs of the unit whose first pair is this lane's
    const u32 firsts = __ballot_sync(~0u, held && (__popc(alike) - __popc(from_here)) % PASS == 0);  // the first pair of each unit
    const int per_unit = (inner + STAGE_COLUMNS - 1) / STAGE_COLUMNS, stages = __popc(firsts) * per_unit;
    const int share = (stages + TILE_WARPS * BLOCKS - 1) / (TILE_WARPS * BLOCKS);
    const int begin = min(stages, (rank * TILE_WARPS + warp / TILES) * share), end = min(stages, begin + share);
    const int stage_bytes = STAGE_BYTES + min(T, PASS) * TOKEN_BYTES, ring_bytes = DEPTH * stage_bytes;
    u8* const ring = shared + warp * ring_bytes;
    const Targets copied = targets_in(shared_address(ring));
    const u32 tokens_copied = shared_address(ring) + STAGE_BYTES + lane / PIECES * TOKEN_BYTES + lane % PIECES * 16;

    // A position in the stages of this warp: the remaining units, the next stage of the first one, and its byte offset in the ring.
    struct Place {
        u32 units;
        int stage, at;
    };
    const auto go_on = [&](Place& place) {
        place.at = place.at + stage_bytes == ring_bytes ? 0 : place.at + stage_bytes;
        const bool last = ++place.stage == per_unit;
        if (last) place.stage = 0, place.units &= place.units - 1;
        return last;
    };
    Place here = {firsts, begin, 0};
    while (here.stage >= per_unit) here.stage -= per_unit, here.units &= here.units - 1;
    const auto first_pair = [](const Place& place) { return __ffs(place.units) - 1 & 31; };

    Sources from;
    const auto find_rows = [&](const Place& place) { from = sources_of(w, __shfl_sync(~0u, id, first_pair(place)), own_row, 8); };
    const auto copy_tokens = [&](const Place& place, u32 pairs) {
        u32 rest = without_lowest(pairs, lane / PIECES);
        const int column = place.stage * STAGE_COLUMNS + lane % PIECES * 8;
        u32 to = tokens_copied + place.at;
        #pragma unroll 1
        for (int left = __popc(pairs); left > 0; left -= AT_ONCE) {
            if (rest != 0) copy16<256>(to, h + (long)(__ffs(rest) - 1) * inner + column, EVEN || column < inner);
            rest = without_lowest(rest, AT_ONCE);
            to += AT_ONCE * TOKEN_BYTES;
        }
    };

    Place ahead = here;
    const int own_stages = end - begin;
    if (own_stages > 0) find_rows(ahead);
    #pragma unroll 1
    for (int i = 0; i < DEPTH; i++) {
        if (i < own_stages) {
            copy_weights(w, from, 8, copied, ahead.at, ahead.stage);
            if (go_on(ahead)) find_rows(ahead);
        }
        commit_copies();
    }
    if (lane < PIECES) zeros[lane] = make_uint4(0, 0, 0, 0);
    if (lane < TOKENS) factors[warp][lane] = 0.0f;

    const Entry entry = entry_of(threadIdx.x, first_row);
    const bool finishes = rank == 0 && threadIdx.x < COUNT && entry.token < T;
    float before = 0.0f;
    if (DEFER && threadIdx.x < TILES * ROWS) gains[threadIdx.x] = gain[entry.column];  // loaded early, as the biases: it may not be cached
    if (BIAS && finishes) {
        #pragma unroll
        for (int j = 0; j < TOP_K; j++) {
            const int expert = routing.ids[entry.token * TOP_K + j] - routing.first;
            if (expert >= 0 && expert < routing.experts)
                before += routing.weights[entry.token * TOP_K + j] * of_bf16(w.bias[(long)expert * hidden + entry.column]);
        }
    }
    if (EARLY) wait_for_previous();

    u32 ahead_pairs = __shfl_sync(~0u, own_unit, first_pair(here)), pairs = ahead_pairs;
    Place tokens_ahead = here;  // tokens are copied as far ahead as weights
    #pragma unroll 1
    for (int i = 0; i < DEPTH; i++) {
        if (i < own_stages) {
            copy_tokens(tokens_ahead, ahead_pairs);
            if (go_on(tokens_ahead)) ahead_pairs = __shfl_sync(~0u, own_unit, first_pair(tokens_ahead));
        }
        commit_copies();
    }
    if (ADD && finishes) {
        const long at = (long)entry.token * hidden + entry.column;
        before += FLOAT_OUT ? ((const float*)out)[at] : of_bf16(((const u16*)out)[at]);
    }

    // Converts the tokens of a stage to float16 in place.
    const auto scale_tokens = [&](u8* tokens) {
        u32 rest = without_lowest(pairs, lane / PIECES);
        u8* row = tokens + lane / PIECES * TOKEN_BYTES;
        #pragma unroll 1
        for (int left = __popc(pairs); left > 0; left -= AT_ONCE) {
            const uint4 v = reordered(rest != 0 ? *(const uint4*)(row + lane % PIECES * 16) : make_uint4(0, 0, 0, 0));
            u32 most = largest8(0, v);
            most = max(most & 0xFFFF, most >> 16);
            if (AT_ONCE == 1) {
                most = largest_of_warp(most);
            } else {
                const u32 low = largest_of_warp(lane < PIECES ? most : 0), high = largest_of_warp(lane < PIECES ? 0 : most);
                most = lane < PIECES ? low : high;
            }
            const int base = base_of(most);
            __syncwarp();  // FORMAT 2 and 3 write where other lanes have read
            if (rest != 0) {
                put_piece(row, lane % PIECES, narrow8(v, base));
                if (lane % PIECES == 0) factors[warp][(__ffs(rest) - 1) / TOP_K] = widening(base);
            }
            rest = without_lowest(rest, AT_ONCE);
            row += AT_ONCE * TOKEN_BYTES;
        }
        __syncwarp();
    };
    // Byte offset of token g in the tokens of a stage; -1 if it is not in the unit.
    const auto place_of_token = [&]() {
        const int pair = (int)kept(g) * TOP_K, first = min(pair, 31);  // recomputed, so that it uses no register during the loop
        const bool in = pair < 32 && (pairs >> first & ~0u >> 32 - TOP_K) != 0;
        return in ? __popc(pairs & (1u << first) - 1) * TOKEN_BYTES : -1;
    };
    Fragments own = fragments_in(ring);
    skip_to_scales(own, w, 0, own_row + g, own_row + g + 8);  // the same for all experts, which have a multiple of eight scales
    int own_token = place_of_token();
    float sums[1][4] = {};
    // With one token in FP8 and all stages in flight, nothing is copied into a stage again, so the stages are converted side by side: the
    // largest values of the stages take as many shuffles as before, but do not wait for each other.
    const bool at_once = FORMAT == 1 && T == 1 && own_stages <= DEPTH;
    if (at_once) {
        wait_copies();
        __syncwarp();
        uint4 v[DEPTH];
        float factor[DEPTH];
        #pragma unroll
        for (int i = 0; i < DEPTH; i++) {
            const u8* const piece = ring + i * stage_bytes + STAGE_BYTES + lane % PIECES * 16;
            v[i] = i < own_stages && lane < PIECES ? *(const uint4*)piece : make_uint4(0, 0, 0, 0);
        }
        #pragma unroll
        for (int i = 0; i < DEPTH; i++) {
            const u32 most = largest8(0, v[i]);
            const int base = base_of(largest_of_warp(max(most & 0xFFFF, most >> 16)));
            v[i] = narrow8(v[i], base), factor[i] = widening(base);
        }
        #pragma unroll
        for (int i = 0; i < DEPTH; i++)
            if (i < own_stages && lane < PIECES) put_piece(ring + i * stage_bytes + STAGE_BYTES, lane, v[i]);
        __syncwarp();
        float part[DEPTH][1][4] = {};
        #pragma unroll
        for (int i = 0; i < DEPTH; i++) {
            const u8* const token = (g == 0 ? (const u8*)(ring + i * stage_bytes + STAGE_BYTES) : (const u8*)zeros) + t * 32;
            if (i < own_stages) multiply_stage<1>(part[i], own, i * stage_bytes, token, 0);
        }
        #pragma unroll
        for (int i = 0; i < DEPTH; i++)
            #pragma unroll
            for (int k = 0; k < 4; k++) sums[0][k] += part[i][0][k] * factor[i];
    }
    #pragma unroll 1
    for (int remaining = at_once ? 0 : own_stages; remaining > 0; remaining--) {
        wait_copies<DEPTH - 1>();
        __syncwarp();
        u8* const tokens = ring + here.at + STAGE_BYTES;
        if (FORMAT != 0) scale_tokens(tokens);
        const u8* const token = (own_token < 0 ? (const u8*)zeros : tokens + own_token) + t * (FORMAT == 1 ? 32 : 16);
        if (FORMAT == 0) {
            multiply_stage<1>(sums, own, here.at, token, 0);
        } else {
            float part[1][4] = {};
            multiply_stage<1>(part, own, here.at, token, 0);
            const float2 factor = *(const float2*)&factors[warp][2 * t];
            sums[0][0] += part[0][0] * factor.x, sums[0][1] += part[0][1] * factor.y;
            sums[0][2] += part[0][2] * factor.x, sums[0][3] += part[0][3] * factor.y;
        }
        if (go_on(here)) {
            pairs = __shfl_sync(~0u, own_unit, first_pair(here));
            own_token = place_of_token();
        }
        __syncwarp();  // all lanes have read the stage
        if (remaining > DEPTH) {
            copy_weights(w, from, 8, copied, ahead.at, ahead.stage);
            copy_tokens(ahead, ahead_pairs);
            if (go_on(ahead)) {
                find_rows(ahead);
                ahead_pairs = __shfl_sync(~0u, own_unit, first_pair(ahead));
            }
        }
        commit_copies();
    }
    wait_copies();
    __syncwarp();
    float* const kept_sums = (float*)ring + 2 * t * STRIDE + g;
    kept_sums[0] = sums[0][0], kept_sums[STRIDE] = sums[0][1];
    kept_sums[8] = sums[0][2], kept_sums[STRIDE + 8] = sums[0][3];
    __syncthreads();
    if (BLOCKS > 1) cluster_wait();  // all blocks have started
    if (rank != 0) {
        const int tile = threadIdx.x / 4 % TILES, token = threadIdx.x / (4 * TILES);
        if (token >= T) return;
        float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        #pragma unroll
        for (int i = 0; i < TILE_WARPS; i++) {
            const float4 v = *(const float4*)((const float*)(shared + (i * TILES + tile) * ring_bytes) + token * STRIDE + threadIdx.x % 4 * 4);
            sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
        }
        send(0, shared_address(&sent[BLOCKS > 1 ? rank - 1 : 0][4 * threadIdx.x]), arrived_at, sum);
        return;
    }
    if (threadIdx.x >= COUNT) return;  // whole warps
    const u32 thread = kept(threadIdx.x);  // values that depend on it are recomputed, so that they use no registers during the loop
    const Entry last = entry_of(thread, first_row);
    const bool in = last.token < T;
    float sum = 0.0f;
    #pragma unroll
    for (int i = 0; i < TILE_WARPS; i++)
        sum += ((const float*)(shared + (i * TILES + thread / ROWS % TILES) * ring_bytes))[last.token * STRIDE + thread % ROWS];
    if (BLOCKS > 1) {
        barrier_wait_first(arrived_at);
        #pragma unroll
        for (int other = 0; other < BLOCKS - 1; other++) sum += in ? sent[other][thread] : 0.0f;
    }
    sum += before;
    const long at_out = (long)last.token * hidden + last.column;
    if (in && FLOAT_OUT) ((float*)out)[at_out] = sum;
    if (in && !FLOAT_OUT) ((u16*)out)[at_out] = to_bf16(sum);
    if (DEFER) {
        const float square = sum_of_lanes<ROWS>(sum * sum);
        if (in) {
            scaled[at_out] = to_bf16(sum * of_bf16(gains[thread % (TILES * ROWS)]));
            if (thread % ROWS == 0) squares[at_out / ROWS] = square;
        }
    }
}
