// One of the two GEMMs of a sparse MLP for few tokens. It reads each weight of the selected experts once, by `stages.cu`.
//
// A unit of work is 16 weight rows of an expert times up to PASS of its tokens. Each block takes neighbouring units, most of them of one expert,
// and keeps their tokens in shared memory. Groups of `split` warps take a unit each and split its columns. Each warp copies its weights into its
// own ring, DEPTH - 1 stages ahead of its multiplications and across units. (Loads into registers would not run ahead: the compiler waits for
// all of them together.)
//
// Constants from the host besides those of `stages.cu`: TOP_K, TOKENS (most tokens), EXPERTS (a multiple of 32, at least those of this
// process), GATED (whether this is the first GEMM), BIAS, SMALL (whether there are at most 32 pairs, of at most PASS tokens), SHARED (whether the
// last pair of each token is the last expert), TILES (of eight tokens), WARPS (8 or 16), DEPTH, SEGMENTS (of a block, at most), WEIGHT_ROWS,
// WEIGHT_COLUMNS (of an expert: addresses are then cheap).
//
// With SMALL, the first GEMM need not wait for the routing to know a shared expert: each block takes some of its units first, and starts their
// copies while the preceding kernels still run.

constexpr int PASS = 8 * TILES, THREADS = 32 * WARPS;
constexpr int AHEAD = SMALL ? 1 : 4 - TILES;  // pieces of its tokens that a lane loads before other warps have read the tokens before
constexpr bool LEADS = SMALL && GATED && SHARED;  // whether units of the shared expert come first in each block
static_assert(PASS <= WARPS, "a warp converts one token at most");

struct Segment {  // the units of a block that have the same tokens
    int expert, skipped, tokens;  // tokens of the expert that earlier units take; tokens of these
    int start, end;               // the unit of the expert's first rows; the first unit after
};

// The units of this block as segments of at most `tiles` units, from the token count of each expert. `range`: its first unit, and the end.
//
// Blocks get shares of about the same cost, in quarters of a unit of eight tokens. Converting weights is bound by instructions, not only by
// memory: units of more tokens need more instructions, and the warps wait for each other when the tokens change.
__device__ __forceinline__ void plan_units(
    const Routing& routing, int count, int tiles, short* experts_of_pairs, int* hits, Segment* segments, int* range
) {
    constexpr int FEW = 4, MANY = FORMAT < 2 ? 4 : 5, CHANGE = 8 * (FORMAT < 2 ? FORMAT : 2);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int i = threadIdx.x; i < EXPERTS; i += THREADS) hits[i] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < count; i += THREADS) {
        const int id = routing.ids[i] - routing.first;
        const bool own = id >= 0 && id < routing.experts;
        experts_of_pairs[i] = own ? id : -1;
        if (own) atomicAdd(&hits[id], 1);
    }
    __syncthreads();
    if (warp == 0) {
        constexpr int OWN = EXPERTS / 32;
        const auto cost_of = [&](int left) { return min(left, PASS) > 8 ? MANY : FEW; };  // of a unit with `left` tokens
        int passes = 0, costs = 0;
        #pragma unroll 1
        for (int j = 0; j < OWN; j++)
            for (int tokens = hits[lane * OWN + j]; tokens > 0; tokens -= PASS) passes++, costs += CHANGE + tiles * cost_of(tokens);
        int pass = passes, cost = costs;  // then the sums over the lanes before this one
        #pragma unroll
        for (int apart = 1; apart < 32; apart *= 2) {
            const int passes_before = __shfl_up_sync(~0u, pass, apart), costs_before = __shfl_up_sync(~0u, cost, apart);
            if (lane >= apart) pass += passes_before, cost += costs_before;
        }
        const int whole = __shfl_sync(~0u, cost, 31);
        const int low = (long)whole * blockIdx.x / gridDim.x, high = (long)whole * (blockIdx.x + 1) / gridDim.x;
        const int own_pass = pass - passes;
        pass = own_pass, cost -= costs;
        int begin = 0x7FFFFFFF, end = 0;
        #pragma unroll 1
        for (int j = 0; j < OWN; j++)
            for (int tokens = hits[lane * OWN + j]; tokens > 0; tokens -= PASS, pass++) {
                const int each = cost_of(tokens), start = cost + CHANGE;  // of the first unit
                const int from = min(max(low - start + each - 1, 0) / each, tiles), to = min(max(high - start + each - 1, 0) / each, tiles);
                if (from < to) begin = min(begin, pass * tiles + from), end = pass * tiles + to;
                cost = start + tiles * each;
            }
        begin = __reduce_min_sync(~0u, begin), end = __reduce_max_sync(~0u, end);
        begin = min(begin, end);
        const int first = begin / tiles;
        pass = own_pass;
        #pragma unroll 1
        for (int j = 0; j < OWN; j++)
            for (int skipped = 0; skipped < hits[lane * OWN + j]; skipped += PASS, pass++)
                if (pass >= first && pass * tiles < end)
                    segments[pass - first] = {lane * OWN + j, skipped, 0, pass * tiles, min(end, (pass + 1) * tiles)};
        if (lane == 0) range[0] = begin, range[1] = end;
    }
    __syncthreads();
}

// The pairs of each segment, in their order.
__device__ __forceinline__ void list_pairs(
    const Routing& routing, int count, int last, const short* experts_of_pairs, Segment* segments, int (*pairs)[PASS], float (*pair_weights)[PASS]
) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int s = warp; s <= last; s += WARPS) {
        const int expert = segments[s].expert;
        int place = -segments[s].skipped;
        for (int base = 0; base < count; base += 32) {
            const int pair = base + lane;
            const bool hit = pair < count && experts_of_pairs[pair] == expert;
            const u32 mask = __ballot_sync(~0u, hit);
            const int own = place + __popc(mask & (1u << lane) - 1);
            if (hit && own >= 0 && own < PASS) {
                pairs[s][own] = pair;
                pair_weights[s][own] = routing.weights[pair];
            }
            place += __popc(mask);
        }
        if (lane == 0) segments[s].tokens = min(place, PASS);
    }
}

// GATED: out[pair] = weight * activation(gate(x[token]), up(x[token])), bfloat16 [T * TOP_K, rows / 2]. Otherwise out[pair] = rows of w times
// x[pair], float32 [T * TOP_K, rows], with the pair's weight for the bias only. `stride`: bytes from a token in shared memory to the next.
extern "C" __global__ void __launch_bounds__(THREADS, 16 / WARPS) experts_few_rows(
    const u16* x, Weights w, Routing routing, void* out, int T, int split, int stride, float alpha, float limit
) {
    extern __shared__ __align__(128) u8 shared[];  // [WARPS][DEPTH] stages: 16 rows of weights, then of scales; tokens
    __shared__ int hits[EXPERTS], range[2];
    __shared__ Segment segments[SEGMENTS];
    __shared__ int pairs[SEGMENTS][PASS];
    __shared__ float pair_weights[SEGMENTS][PASS];
    __shared__ float parts[WARPS][TILES][4][32];  // partial sums of the warps that share a unit; another warp adds them
    __shared__ __align__(8) u64 left[WARPS / 2], taken[WARPS / 2];  // of a unit: its parts are written; they have been read
    static_assert(TOKENS * TOP_K * sizeof(short) <= sizeof parts);
    short* const experts_of_pairs = (short*)parts;  // only before the first unit
    __shared__ u32 largest[WARPS];  // magnitude that a warp has found in its part of a token
    __shared__ float widenings[PASS];
    __shared__ uint4 biases[BIAS ? WARPS : 1][DEPTH][2];  // of a unit, stored with its last stage: for the low rows and the high ones
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    w.rows = WEIGHT_ROWS, w.columns = WEIGHT_COLUMNS;
    const int inner = w.rows / 2, tiles = GATED ? inner / 8 : w.rows / 16, count = T * TOP_K;

    // Experts have `tiles` units each. If `hit` of them, at most 32, have tokens, this block begins at unit hit * tiles * blockIdx.x / blocks. What
    // needs no routing comes first. __umulhi(n, inverse) is n / blocks if 1 < blocks and n * blocks < 2^32.
    const u32 blocks = gridDim.x, inverse = 0xFFFFFFFFu / blocks + 1;
    const u32 whole = tiles * blockIdx.x / blocks, rest = tiles * blockIdx.x % blocks;
    const u32 next_whole = tiles * (blockIdx.x + 1) / blocks, next_rest = tiles * (blockIdx.x + 1) % blocks;
    int begin = 0, end = 0, last = 0;  // units, and the last segment
    const int groups = WARPS / split, member = warp % split;
    const auto left_at = [&]() { return shared_address(left) + warp / split * 8; };
    const auto taken_at = [&]() { return shared_address(taken) + warp / split * 8; };
    const int stages = (w.columns + STAGE_COLUMNS - 1) / STAGE_COLUMNS, share = (stages + split - 1) / split;
    const int first = min(stages, member * share), stop = min(stages, first + share);
    u8* const own_ring = shared + warp * DEPTH * STAGE_BYTES;
    const Targets copied = targets_in(shared_address(own_ring));

    // The stage that is copied next: of which unit, its rows, and its place in the ring. A lane copies from four rows, and scales from one.
    int unit_ahead = 0, segment_ahead = 0, stage_ahead = first, place_ahead = 0;
    Sources from;
    const int next = GATED ? inner : 8;  // from the low rows to the high ones
    const auto find_rows = [&]() {
        if (unit_ahead >= end) return;
        while (unit_ahead >= segments[segment_ahead].end) segment_ahead++;
        from = sources_of(w, segments[segment_ahead].expert, (unit_ahead - segments[segment_ahead].start) * (GATED ? 8 : 16), next);
    };
    const auto copy_stage = [&]() {
        if (unit_ahead < end && first < stop) {
            copy_weights(w, from, next, copied, place_ahead, stage_ahead);
            if (++stage_ahead == stop) {
                // A load into registers would be waited for before the first stage of the unit.
                if (BIAS && member == 0 && lane < 2) {
                    const Segment& of = segments[segment_ahead];
                    const int row = (unit_ahead - of.start) * (GATED ? 8 : 16) + lane * next;
                    uint4* const to = &biases[warp][place_ahead / STAGE_BYTES][lane];
                    copy16<256>(shared_address(to), w.bias + (long)of.expert * w.rows + row);
                }
                stage_ahead = first;
                unit_ahead += groups;
                find_rows();
            }
        }
        place_ahead = place_ahead + STAGE_BYTES == DEPTH * STAGE_BYTES ? 0 : place_ahead + STAGE_BYTES;
        commit_copies();
    };

    const int lead = LEADS ? next_whole - whole : 0;  // units of the shared expert
    int ahead = 0;                                    // stages whose copies have started
    if (LEADS && lead > 0) {  // each warp writes what the others write
        if (lane == 0) segments[0] = {routing.experts - 1, 0, T, -(int)whole, lead};
        if (lane < T) pairs[0][lane] = lane * TOP_K + TOP_K - 1;
        __syncwarp();
        unit_ahead = warp / split, end = lead;
        find_rows();
        #pragma unroll
        for (int i = 0; i < DEPTH - 1; i++)
            if (unit_ahead < end) copy_stage(), ahead++;
    }
    // The second GEMM may read the routing before it waits: the first one lets it start when its own wait is over.
    if (EARLY && GATED) wait_for_previous(), launch_next();
    if (EARLY && !GATED) launch_next();
    if (SMALL) {  // no expert has more than PASS tokens, and a warp holds all pairs: each plans by itself, and writes what the others write
        const int id = lane < count ? routing.ids[lane] - routing.first : -1;
        const float weight = lane < count ? routing.weights[lane] : 0.0f;
        const bool routed_pair = !LEADS || lane % TOP_K != TOP_K - 1;
        if (lead > 0 && lane < count && !routed_pair) pair_weights[0][lane / TOP_K] = weight;
        const bool own = id >= 0 && id < routing.experts && routed_pair;
        const u32 alike = __match_any_sync(~0u, own ? id : -1);
        const bool is_first = own && lane == __ffs(alike) - 1;  // pair of its expert
        const u32 firsts = __ballot_sync(~0u, is_first), hit = __popc(firsts), before = __popc(firsts & (1u << lane) - 1);
        const u32 all = LEADS ? hit + 1 : hit;  // experts with tokens, of which a block has `lead` units of the shared one
        begin = hit * whole + __umulhi(all * rest, inverse), end = hit * next_whole + __umulhi(all * next_rest, inverse);
        const int pass = LEADS ? begin / tiles : __umulhi(hit * blockIdx.x, inverse);  // begin / tiles
        const int shift = LEADS ? lead - begin : 0;  // the units of a block with a shared expert begin at 0
        for (int s = 0; (pass + s) * tiles < end; s++) {
            const int source = __ffs(__ballot_sync(~0u, is_first && before == pass + s)) - 1;
            const int expert = __shfl_sync(~0u, id, source), start = (pass + s) * tiles;
            const u32 routed = __shfl_sync(~0u, alike, source);
            const int place = __popc(routed & (1u << lane) - 1);
            last = s + (lead > 0);
            if (own && id == expert) pairs[last][place] = lane, pair_weights[last][place] = weight;
            if (lane == 0) segments[last] = {expert, 0, __popc(routed), start + shift, min(end, start + tiles) + shift};
        }
        if (LEADS) begin = 0, end += shift;
        __syncwarp();
    } else {
        plan_units(routing, count, tiles, experts_of_pairs, hits, segments, range);
        begin = range[0], end = range[1];
        last = (end - 1) / tiles - begin / tiles;
    }
    if (begin == end) {
        if (EARLY && !GATED) wait_for_previous();
        return;
    }
    if (split > 1 && member == 0 && lane == 0) barrier_init(left_at(), split - 1), barrier_init(taken_at(), 1);
    if (ahead == 0) unit_ahead = begin + warp / split;
    if (!LEADS || unit_ahead >= lead) find_rows();
    #pragma unroll
    for (int i = 0; i < DEPTH - 1; i++)
        if (i >= ahead) copy_stage();

    if (!SMALL) list_pairs(routing, count, last, experts_of_pairs, segments, pairs, pair_weights);
    if (EARLY && !GATED) wait_for_previous();
    __syncthreads();

    u8* const tokens_at = shared + WARPS * DEPTH * STAGE_BYTES;
    if (!EVEN)  // the weights that a stage has past a row's end are zeros
        for (int i = warp; i < (TILES == 1 ? min(PASS, T) : PASS); i += WARPS)
            for (int at = 2 * w.columns + 16 * lane; at < 2 * stages * STAGE_COLUMNS; at += 512) *(uint4*)(tokens_at + i * stride + at) = make_uint4(0, 0, 0, 0);
    const auto take_tokens = [&](int s) {  // the whole block: 2^log warps take a token
        const int tokens = segments[s].tokens;
        int log = 0;
        while ((2 << log) * tokens <= WARPS) log++;
        const int i = warp >> log, part = warp & (1 << log) - 1;
        u8* const to = tokens_at + i * stride;
        const int begin = 32 * part + lane, step = 32 << log, pieces = i < tokens ? w.columns / 8 : 0;
        const u16* const from = i < tokens ? x + (long)(GATED ? pairs[s][i] / TOP_K : pairs[s][i]) * w.columns : x;
        u32 most = 0;
        const auto take = [&](int piece, uint4 v) {
            v = reordered(v);
            put_piece(to, piece, v);
            most = largest8(most, v);
        };
        uint4 ahead[AHEAD];
        #pragma unroll
        for (int j = 0; j < AHEAD; j++)
            if (begin + j * step < pieces) ahead[j] = *(const uint4*)(from + 8 * (begin + j * step));
        if (s > 0) __syncthreads();
        #pragma unroll
        for (int j = 0; j < AHEAD; j++)
            if (begin + j * step < pieces) take(begin + j * step, ahead[j]);
        #pragma unroll 4
        for (int piece = begin + AHEAD * step; piece < pieces; piece += step) take(piece, *(const uint4*)(from + 8 * piece));
        if (FORMAT != 0) {
            most = largest_of_warp(max(most & 0xFFFF, most >> 16));
            if (lane == 0) largest[warp] = most;
            __syncthreads();
            if (i < tokens) {
                const int base = base_of(largest_of_warp(largest[(i << log) + (lane & (1 << log) - 1)]));
                if (part == 0 && lane == 0) widenings[i] = widening(base);
                #pragma unroll 4
                for (int piece = begin; piece < pieces; piece += step) put_piece(to, piece, narrow8(get_piece(to, piece), base));
            }
        }
        __syncthreads();
    };
    int segment = 0, place = 0;
    take_tokens(0);
    // Lanes share a token if there are few.
    const u8* const own_tokens = tokens_at + (TILES == 1 ? min(g, T - 1) : g) * stride + t * (FORMAT == 1 ? 32 : 16);
    const Fragments own = fragments_in(own_ring);
    int unit = begin + warp / split;
    u32 round = 0;
    while (true) {
        int of = segment;
        while (of < last && unit >= segments[of].end) of++;
        while (segment < of) take_tokens(++segment);
        if (unit >= end) break;
        const Segment here = segments[segment];
        const int tile = unit - here.start, row = GATED ? tile * 8 + g : tile * 16 + g, other = row + (GATED ? inner : 8);
        Fragments of_unit = own;
        skip_to_scales(of_unit, w, here.expert, row, other);
        float sums[TILES][4] = {};
        for (int stage = first; stage < stop; stage++) {
            wait_copies<DEPTH - 2>();
            __syncwarp();
            copy_stage();  // overwrites the previous stage; after __syncwarp all lanes have read it
            const u8* const columns = own_tokens + stage * (2 * STAGE_COLUMNS);
            if (TILES > 1 && here.tokens > 8) multiply_stage<TILES>(sums, of_unit, place, columns, stride);
            else multiply_stage<1>(sums, of_unit, place, columns, stride);
            place = place + STAGE_BYTES == DEPTH * STAGE_BYTES ? 0 : place + STAGE_BYTES;
        }
        unit += groups;
        if (split > 1) {  // the first warp of a group waits for the parts of the others, which wait until it has read their previous parts
            if (member != 0) {
                if (round > 0) barrier_wait(taken_at(), (round - 1) & 1);
                #pragma unroll
                for (int n = 0; n < TILES; n++)
                    #pragma unroll
                    for (int i = 0; i < 4; i++) parts[warp][n][i][lane] = sums[n][i];
                __syncwarp();
                if (lane == 0) barrier_arrive(left_at());
            } else {
                barrier_wait(left_at(), round & 1);
                for (int k = 1; k < split; k++)
                    #pragma unroll
                    for (int n = 0; n < TILES; n++)
                        #pragma unroll
                        for (int i = 0; i < 4; i++) sums[n][i] += parts[warp + k][n][i][lane];
                __syncwarp();
                if (lane == 0) barrier_arrive(taken_at());
            }
            round++;
        }
        if (member != 0) continue;
        const u16* const unit_biases = (const u16*)biases[BIAS ? warp : 0][(place == 0 ? DEPTH : place / STAGE_BYTES) - 1];  // of the last stage
        const float low_bias = BIAS ? of_bf16(unit_biases[g]) : 0.0f, high_bias = BIAS ? of_bf16(unit_biases[8 + g]) : 0.0f;
        #pragma unroll
        for (int n = 0; n < TILES; n++)
            #pragma unroll
            for (int odd = 0; odd < 2; odd++) {
                const int token = 8 * n + 2 * t + odd;
                if (token >= here.tokens) continue;
                const long pair = pairs[segment][token];
                const float weight = pair_weights[segment][token], factor = FORMAT == 0 ? 1.0f : widenings[token];
                const float a = sums[n][odd] * factor, b = sums[n][2 + odd] * factor;
                if (GATED) {
                    ((u16*)out)[pair * inner + row] = to_bf16(activate(a + low_bias, b + high_bias, alpha, limit) * weight);
                } else {
                    ((float*)out)[pair * w.rows + row] = a + weight * low_bias;
                    ((float*)out)[pair * w.rows + other] = b + weight * high_bias;
                }
            }
    }
    wait_copies();
}
