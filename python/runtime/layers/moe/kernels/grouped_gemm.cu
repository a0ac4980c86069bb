// One of the two grouped GEMMs of experts for many tokens: tiles of ROWS pairs of one expert by TILE rows of its weights (WGMMA).
//
// GATED, the first: rows of x are gathered by the tokens of the pairs, and act(gate) * up is stored in the order of the sorted pairs, which
// is the row order of x in the second GEMM. The second one stores rows times the weights of their pairs, each at the index of its pair.
//
// A warpgroup loads a ring of stages: weights by TMA, gathered rows by cp.async into the same swizzle, sorted rows by TMA. Two or three
// warpgroups multiply 64 pairs each. Each warp transposes its results in shared memory and stores them in pieces of whole sectors: bulk
// copies would need one copy per row, because each row has a separate address.
//
// With CLUSTER_M = 2, the two blocks of a cluster take neighbouring tiles of pairs of an expert and load half of the weights for both. If the
// number of tiles is odd, they take the last one with neighbouring tiles of weights instead. Both take equally long: a tile in the table
// counts as half as many work items as there are tiles of weights. Items are ordered by expert, and clusters take them round robin, so
// that blocks that run at the same time share weights and rows of x in L2.
//
// With ELEMENT = 1, x and the weights are e4m3. Sums of 128 columns by 128 rows of weights are multiplied by their scales, then added:
// the two halves of a tile one after another, because a thread only has registers for one half and its sums. The first GEMM stores e4m3
// with a scale for each row and tile, which is 128 columns of the second.
//
// Defined before this text: ROWS (128 or 192), TILE, CLUSTER_M, CLUSTER_N = 1, STAGES, STORED, ELEMENT (bytes), GATED, ACT, BFLOAT16, BIAS, EARLY,
// LOADERS, LOAD_REGISTERS; multiply(); gemm/wgmma_parts.cu; grouped_parts.cu.

constexpr int SILU = 0, CLAMPED_SWIGLU = 1, GELU_TANH = 2;
constexpr int HALVES = GATED ? 2 : 1, OUTPUTS = TILE / HALVES;
constexpr int DEPTH = ROW_BYTES / ELEMENT;  // columns of a stage
constexpr int X_BYTES = ROWS * ROW_BYTES, W_BYTES = TILE * ROW_BYTES, STAGE_BYTES = X_BYTES + W_BYTES;
constexpr int BOX_ROWS = TILE / 2;  // of weights; in the first GEMM one box holds gates, the other one ups
constexpr int PITCH = STORED * 2 + 16;  // bytes from row to row of the columns that are staged together, without bank conflicts
constexpr int BARRIERS = STAGES * STAGE_BYTES + ROWS * PITCH;
constexpr int SCALE_BLOCK = 128;        // rows and columns of weights with one scale, and columns of a row between the GEMMs
constexpr bool QUANTIZES = ELEMENT == 1 && GATED;
static_assert(ELEMENT == 2 || (TILE == 2 * SCALE_BLOCK && STORED * 2 == SCALE_BLOCK));

// Scales of e4m3 weights [E, scale_rows, scale_columns], of rows of x, and those that are stored. Rows of x have one scale in the first
// GEMM; those between the GEMMs have [width / SCALE_BLOCK, places].
struct Scales { const float *weights, *rows; float* out; int scale_rows, scale_columns, places; };

// What the table says of a tile: its expert, the tiles of that before it, and the pairs of that from here on.
struct Entry { int expert, before, left; };
// A tile of pairs, of which `rows` are real, and a tile of weights, which may lie past the last one. `shared`: with the other block.
struct Item { int expert, tile, column, rows; bool shared; };

struct Work {
    Tiles tiles;
    int each, count, block;  // items of a tile of the table; all of them; of this block in its cluster

    __device__ __forceinline__ Work(const Tiles& tiles, int n_tiles) : tiles(tiles), block(blockIdx.x % CLUSTER_M) {
        each = (n_tiles + CLUSTER_M - 1) / CLUSTER_M;
        count = *tiles.used * each;
    }
    __device__ __forceinline__ Entry entry(int i) const {
        if (i >= count) return {0, 0, 0};
        const int tile = i / each;
        const int2 place = *(const int2*)(tiles.places + 2 * tile);
        return {tiles.experts[tile], place.x, place.y};
    }
    __device__ __forceinline__ Item item(int i, const Entry& e) const {
        const int tile = i / each, column = i % each;
        if constexpr (CLUSTER_M == 1) return {e.expert, tile, column, min(e.left, ROWS), false};
        const int second = e.before & 1;
        if (!second && e.left <= ROWS) return {e.expert, tile, column * 2 + block, e.left, false};
        return {e.expert, tile - second + block, second * each + column, min(e.left + (second - block) * ROWS, ROWS), true};
    }
};

// Four 8 x 8 matrices as they lie in the sums: rows 0-7 and 8-15 of eight columns, then of the next eight. `to`: row `lane % 16`, the first
// eight columns in lanes below 16, the others above.
__device__ __forceinline__ void store_matrices(u32 to, const u32 (&words)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared::cta.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(words[0]), "r"(words[1]),
                 "r"(words[2]), "r"(words[3])
                 : "memory");
}

// Two values as e4m3, the second in the upper byte.
__device__ __forceinline__ u16 quantize(float low, float high) {
    u16 both;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(both) : "f"(high), "f"(low));
    return both;
}

// act(gate) * up of two neighbouring columns. They share a reciprocal, because the unit of special functions limits the end of a tile: that
// of the product of their divisors, which are at most 2^60 so that it is finite. There act(gate) is 1e-18 of the gate.
__device__ __forceinline__ void multiply_gates(float (&gates)[2], const float (&ups)[2], const Gate& act) {
    float divisors[2], factors[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        float& gate = gates[i];
        float slope = gate;
        factors[i] = ups[i];
        if constexpr (ACT == GELU_TANH) slope = 1.5957691216057308f * (gate + 0.044715f * gate * gate * gate);
        if constexpr (ACT == CLAMPED_SWIGLU) {
            gate = fminf(gate, act.limit);
            factors[i] = fminf(fmaxf(ups[i], -act.limit), act.limit) + 1.0f;
            slope = act.alpha * gate;
        }
        divisors[i] = 1.0f + exp2_of(fminf(slope * -1.4426950408889634f, 60.0f));
    }
    const float inverse = reciprocal_of(divisors[0] * divisors[1]);
#pragma unroll
    for (int i = 0; i < 2; i++) gates[i] *= divisors[1 - i] * inverse * factors[i];
}

// The loading warpgroup's part in the weights of one item.
struct Weights {
    const TensorMap* map;
    int rows, columns, block;  // of an expert; of the output

    // Load columns `depth` and on of an item's tile into `to`. A shared tile comes half from here, to both blocks.
    __device__ __forceinline__ void load(const Item& item, u32 to, u32 barrier, int depth) const {
        const int first = item.expert * rows + item.column * OUTPUTS;
#pragma unroll
        for (int box = 0; box < 2; box++) {
            const int row = first + box * (GATED ? columns : BOX_ROWS);
            const u32 at = to + box * BOX_ROWS * ROW_BYTES;
            if (!item.shared) load_box<false>(at, map, barrier, depth, row, EVICT_NORMAL, 0);
            else if (box == block) load_box<true>(at, map, barrier, depth, row, EVICT_NORMAL, 3);
        }
    }
};

// Where the results of an item go, for one thread.
struct Output {
    u16* out;
    const u16* bias;
    int rows, columns;  // of weights of an expert; of the output
    Gate act;
    u32 staging;        // of the warp: 16 rows
    int lane;

    // Sums of two columns in both rows of the thread, ready to be stored.
    __device__ __forceinline__ void finish(
        float* v, const float* up, int column, int expert, const float (&scale)[2], const float (&weight)[2]
    ) const {
        float two[2][2] = {{v[0], v[1]}, {v[2], v[3]}}, others[2][2] = {};
        if constexpr (GATED) others[0][0] = up[0], others[0][1] = up[1], others[1][0] = up[2], others[1][1] = up[3];
        u32 biases[HALVES] = {};
        if constexpr (BIAS) {
            if (column < columns) {
#pragma unroll
                for (int half = 0; half < HALVES; half++)
                    biases[half] = *(const u32*)(bias + (long)expert * rows + half * columns + column);
            }
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float& sum = two[i / 2][i % 2];
            float& other = others[i / 2][i % 2];
            if constexpr (QUANTIZES) sum *= scale[i / 2], other *= scale[i / 2];
            if constexpr (BIAS) {
                sum += widen(biases[0] >> i % 2 * 16);
                if constexpr (GATED) other += widen(biases[HALVES - 1] >> i % 2 * 16);
            }
            if constexpr (!GATED) sum *= weight[i / 2];
        }
        if constexpr (GATED) multiply_gates(two[0], others[0], act), multiply_gates(two[1], others[1], act);
#pragma unroll
        for (int i = 0; i < 4; i++) v[i] = two[i / 2][i % 2];
    }
    // Store an item's sums as e4m3, in rows from `top` on, of which the first `valid` of the warp are stored.
    __device__ __forceinline__ void store_quantized(
        float* sums, const Item& item, int top, int valid, const Scales& scales, const float (&scale)[2]
    ) const {
        if (item.column * OUTPUTS >= columns) return;  // `columns` is a multiple of SCALE_BLOCK
        float largest[2] = {1e-12f, 1e-12f};
#pragma unroll
        for (int i = 0; i < OUTPUTS / 8; i++) {
            float* v = sums + i * 4;
            finish(v, v + OUTPUTS / 2, item.column * OUTPUTS + i * 8 + lane % 4 * 2, item.expert, scale, {});
#pragma unroll
            for (int j = 0; j < 4; j++) largest[j / 2] = fmaxf(largest[j / 2], fabsf(v[j]));
        }
        float factors[2];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            largest[half] = fmaxf(largest[half], __shfl_xor_sync(~0u, largest[half], 1));
            largest[half] = fmaxf(largest[half], __shfl_xor_sync(~0u, largest[half], 2));
            factors[half] = 448.0f / largest[half];
            const int row = lane / 4 + half * 8;
            if (lane % 4 == 0 && row < valid) scales.out[item.column * scales.places + top + row] = largest[half] / 448.0f;
        }
        __syncwarp();  // what was staged before has been read
#pragma unroll
        for (int i = 0; i < OUTPUTS / 8; i++) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const float* v = sums + i * 4 + half * 2;
                const u32 to = staging + (lane / 4 + half * 8) * PITCH + i * 8 + lane % 4 * 2;
                const u16 both = quantize(v[0] * factors[half], v[1] * factors[half]);
                asm volatile("st.shared.u16 [%0], %1;" ::"r"(to), "h"(both) : "memory");
            }
        }
        __syncwarp();
        constexpr int PIECES = OUTPUTS / 16, AT_ONCE = 32 / PIECES;  // of 16 bytes, of a row; rows that the warp stores at once
#pragma unroll
        for (int row = lane / PIECES; row < 16; row += AT_ONCE) {
            const uint4 words = load_shared(staging + row * PITCH + lane % PIECES * 16);
            if (row < valid) *(uint4*)((char*)out + (long)(top + row) * columns + item.column * OUTPUTS + lane % PIECES * 16) = words;
        }
    }
    // Store an item's sums; both rows of this thread go to rows `targets` of the output, and the first `valid` rows of the warp are stored.
    __device__ __forceinline__ void store(
        float* sums, const Item& item, const int (&targets)[2], int valid, const float (&scale)[2], const float (&weight)[2]
    ) const {
        constexpr int PIECES = STORED / 8, AT_ONCE = 32 / PIECES;  // of 16 bytes, of a row; rows that the warp stores at once
        const u32 to = staging + lane % 16 * PITCH + lane / 16 * 16;
        const int piece = lane % PIECES;
        int rows_to[16 / AT_ONCE];
#pragma unroll
        for (int i = 0; i < 16 / AT_ONCE; i++) {
            const int row = i * AT_ONCE + lane / PIECES;
            const int low = __shfl_sync(~0u, targets[0], row % 8 * 4), high = __shfl_sync(~0u, targets[1], row % 8 * 4);
            rows_to[i] = row >= valid ? -1 : row < 8 ? low : high;
        }
#pragma unroll
        for (int pass = 0; pass < OUTPUTS / STORED; pass++) {
            const int first = item.column * OUTPUTS + pass * STORED;
            __syncwarp();  // what was staged before has been read
#pragma unroll
            for (int i = 0; i < STORED / 8; i += 2) {
                u32 words[4];
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    float* v = sums + (pass * STORED / 8 + i + j) * 4;
                    finish(v, v + (GATED ? OUTPUTS / 2 : 0), first + (i + j) * 8 + lane % 4 * 2, item.expert, scale, weight);
                    words[2 * j] = narrow(v[0], v[1]), words[2 * j + 1] = narrow(v[2], v[3]);
                }
                store_matrices(to + i * 16, words);
            }
            __syncwarp();
            const int column = first + piece * 8;
#pragma unroll
            for (int i = 0; i < 16 / AT_ONCE; i++) {
                const uint4 words = load_shared(staging + (i * AT_ONCE + lane / PIECES) * PITCH + piece * 16);
                if (rows_to[i] >= 0 && column < columns) *(uint4*)(out + (long)rows_to[i] * columns + column) = words;
            }
        }
    }
};

extern "C" __global__ void __launch_bounds__(MULTIPLIERS + LOADERS, 1)
#if GATED
grouped_gemm(const u16* x,
#else
grouped_gemm(const __grid_constant__ TensorMap x_map,
#endif
             const __grid_constant__ TensorMap w_map, const Tiles tiles, const Scales scales, u16* out, const u16* bias,
             const float* pair_weights, int rows, int columns, int width, int top_k, const Gate act) {
    extern __shared__ __align__(1024) char shared[];
    const u32 data = shared_address(shared);
    Ring ring(data, data + BARRIERS, STAGE_BYTES, STAGES);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int n_tiles = (columns + OUTPUTS - 1) / OUTPUTS, steps = (width + DEPTH - 1) / DEPTH;
    const int first = blockIdx.x / CLUSTER_M, step = gridDim.x / CLUSTER_M;
    if constexpr (EARLY) launch_next();
    if (threadIdx.x == 0) {
        if (data % 1024 != 0) asm volatile("trap;");  // the 128-byte swizzle needs stages aligned to 1024 bytes
        for (int s = 0; s < STAGES; s++) {
            // Arrivals: one thread expects the bytes of the boxes; with GATED, all LOADERS threads also arrive when their copies are complete.
            barrier_init(ring.full + s * 8, GATED ? LOADERS + 1 : 1);
            barrier_init(ring.empty + s * 8, MULTIPLIERS / 32 * CLUSTER_M);
        }
        publish_barriers();
    }
    if constexpr (CLUSTER_M > 1) cluster_sync<false>();
    else __syncthreads();
    wait_for_previous();  // for the table of tiles, which also selects the weights
    const Work work(tiles, n_tiles);

    if (warp >= MULTIPLIERS / 32) {
        leave_registers<LOAD_REGISTERS>();
        const int member = threadIdx.x - MULTIPLIERS;
        const Weights weights = {&w_map, rows, columns, work.block};
#if GATED
        constexpr int COPIES = ROWS * 8 / LOADERS, STRIDE = LOADERS / 8;  // of a thread: 16-byte copies, and the rows between them
        const int row = member / 8, piece = member % 8;
        const u32 to = data + row * ROW_BYTES + (piece ^ row % 8) * 16;
        const int limit = width * ELEMENT / 16;
        for (int i = first; i < work.count; i += step) {
            const Item item = work.item(i, work.entry(i));
            u32 from[COPIES];
            bool in[COPIES];  // rows past the last pair read as zeros, which cost no traffic and little power
#pragma unroll
            for (int r = 0; r < COPIES; r++) {
                const int at = row + r * STRIDE;
                in[r] = at < item.rows;
                from[r] = (u32)(in[r] ? tiles.pairs[item.tile * ROWS + at] / top_k : 0) * limit + piece;
            }
            for (int s = 0; s < steps; s++, ring.next()) {
                ring.wait_empty();
                if (member == 0) {
                    barrier_expect(ring.full_here(), W_BYTES);
                    weights.load(item, ring.here() + X_BYTES, ring.full_here(), s * DEPTH);
                }
                const bool inside = s * 8 + piece < limit;
#pragma unroll
                for (int r = 0; r < COPIES; r++) {
                    const u32 at = to + ring.stage * STAGE_BYTES + r * STRIDE * ROW_BYTES;
                    copy16<128>(at, (const uint4*)x + (inside ? from[r] + s * 8 : 0), inside && in[r]);
                }
                barrier_arrive_after_copies(ring.full_here());
            }
        }
#else
        if (member > 0) return;
        for (int i = first; i < work.count; i += step) {
            const Item item = work.item(i, work.entry(i));
            for (int s = 0; s < steps; s++, ring.next()) {
                ring.wait_empty();
                barrier_expect(ring.full_here(), STAGE_BYTES);
                load_box<false>(ring.here(), &x_map, ring.full_here(), s * DEPTH, item.tile * ROWS, EVICT_NORMAL, 0);
                weights.load(item, ring.here() + X_BYTES, ring.full_here(), s * DEPTH);
            }
        }
#endif
        // The block must not exit before the other block's warps have arrived at its `empty` barriers for the last time.
        if constexpr (CLUSTER_M > 1) {
            for (int s = 0; s < STAGES; s++, ring.next()) ring.wait_empty();
        }
        return;
    }

    take_registers<MULTIPLY_REGISTERS>();
    const int group = warp / 4, warp_row = warp % 4 * 16;
    const Output output = {out, bias, rows, columns, act, data + STAGES * STAGE_BYTES + warp * 16 * PITCH, lane};
    const u32 peer_empty = CLUSTER_M > 1 ? address_in(ring.empty, min(lane, CLUSTER_M - 1)) : ring.empty;
    auto release = [&](int stage) {
        if constexpr (CLUSTER_M == 1) {
            if (lane == 0) barrier_arrive(peer_empty + stage * 8);
        } else {
            if (lane < CLUSTER_M) barrier_arrive_in_cluster(peer_empty + stage * 8);
        }
    };
    Entry next = work.entry(first);
    for (int i = first; i < work.count; i += step) {
        const Item item = work.item(i, next);
        next = work.entry(i + step);  // on its way during this item, as the pairs are
        const int valid = item.rows - group * 64, top = item.tile * ROWS + group * 64;
        if (valid <= 0) {
            for (int s = 0; s < steps; s++, ring.next()) {
                ring.wait_full();
                release(ring.stage);
            }
            continue;
        }
        int pairs[2] = {0, 0};
        if constexpr (!GATED || QUANTIZES) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int row = warp_row + lane / 4 + half * 8;
                if (row < valid) pairs[half] = tiles.pairs[top + row];
            }
        }
        float sums[TILE / 2], scale[2] = {1.0f, 1.0f}, weight[2] = {1.0f, 1.0f};
        // Rows past the last pair have no scale and no weight of their own.
        auto load_factors = [&]() {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int row = warp_row + lane / 4 + half * 8;
                if (row >= valid) continue;
                if constexpr (!GATED) weight[half] = pair_weights[pairs[half]];
                if constexpr (QUANTIZES) scale[half] = scales.rows[pairs[half] / top_k];
            }
        };
        auto wait_stage = [&]() {
            ring.wait_full();
            if constexpr (GATED) fence_async();  // wgmma reads what cp.async has written
            asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
        };
#if ELEMENT == 2
        int before = 0;
        for (int s = 0; s < steps; s++, ring.next()) {
            wait_stage();
            const u64 x_here = descriptor(ring.here() + group * 64 * ROW_BYTES), w_here = descriptor(ring.here() + X_BYTES);
#pragma unroll
            for (int k = 0; k < ROW_BYTES / 32; k++) multiply(sums, x_here + k * 2, w_here + k * 2, s > 0 || k > 0);
            asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 1;" ::: "memory");
            if (s > 0) release(before);
            before = ring.stage;
        }
        load_factors();  // while the tensor cores multiply by the last columns
        asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
        release(before);
        __syncwarp();  // otherwise the assembler moves the activation of the sums before the release
#pragma unroll
        for (int j = 0; j < TILE / 2; j++) asm volatile("" : "+f"(sums[j])::"memory");
#else
#pragma unroll
        for (int j = 0; j < TILE / 2; j++) sums[j] = 0.0f;
        int blocks[2];  // of scales: of the first columns of either half of the tile
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = GATED ? half * columns + item.column * OUTPUTS : item.column * TILE + half * SCALE_BLOCK;
            blocks[half] = (item.expert * scales.scale_rows + min(row, rows - 1) / SCALE_BLOCK) * scales.scale_columns;
        }
        // In the second GEMM, a step is what has a scale in each row. Two lanes load those of the two rows that they hold, one step early.
        int scale_at = top + warp_row + lane / 4 + lane % 2 * 8;
        float next_scale = GATED ? 1.0f : scales.rows[scale_at];
        for (int s = 0; s < steps; s++, ring.next()) {
            float factors[2];
            const float row_scale = next_scale;
#pragma unroll
            for (int half = 0; half < 2; half++) factors[half] = scales.weights[blocks[half] + s];  // there when the sums are
            if (!GATED && s + 1 < steps) next_scale = scales.rows[scale_at += scales.places];
            wait_stage();
            const u64 x_here = descriptor(ring.here() + group * 64 * ROW_BYTES), w_here = descriptor(ring.here() + X_BYTES);
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float part[TILE / 4], both[2] = {1.0f, 1.0f};
                if (half > 0) asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
                for (int k = 0; k < ROW_BYTES / 32; k++)
                    multiply(part, x_here + k * 2, w_here + half * (BOX_ROWS * ROW_BYTES / 16) + k * 2, k > 0);
                asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;" ::: "memory");
                if (half > 0) release(ring.stage);
#pragma unroll
                for (int j = 0; j < TILE / 4; j++) asm volatile("" : "+f"(part[j])::"memory");
#pragma unroll
                for (int row = 0; row < 2; row++) both[row] = factors[half] * (GATED ? 1.0f : __shfl_sync(~0u, row_scale, row, 2));
#pragma unroll
                for (int j = 0; j < TILE / 4; j++) sums[half * TILE / 4 + j] += part[j] * both[j / 2 % 2];
            }
        }
        load_factors();
        __syncwarp();
#endif
        if constexpr (QUANTIZES) {
            output.store_quantized(sums, item, top + warp_row, valid - warp_row, scales, scale);
        } else {
            const int sorted = top + warp_row + lane / 4, targets[2] = {GATED ? sorted : pairs[0], GATED ? sorted + 8 : pairs[1]};
            output.store(sums, item, targets, valid - warp_row, scale, weight);
        }
    }
}
