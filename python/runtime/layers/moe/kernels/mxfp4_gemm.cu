// One of the two grouped GEMMs of experts in MXFP4: tiles of up to PAIRS pairs of one expert by some matrices of 64 rows of its weights (WGMMA).
//
// Weights are the left operand, in registers: each is read from shared memory and widened to float16 once per tile of pairs, times its scale over
// the largest one of its row, which the sums are multiplied by. Rows of x, which `mxfp4_rows.cu` has prepared, are the right operand, in shared
// memory. Each multiplying warpgroup has two matrices; with GATED, the first GEMM, these are 64 rows of gates and the
// ups of the same columns.
//
// A warpgroup loads a ring of stages of 128 columns: weights by TMA, rows of x by cp.async into the same kind of swizzle. Columns of x are in the
// order in which lanes get weights. Lane (g, t) of a warp gets bytes 4 t to 4 t + 3 of the 16 bytes that share a scale, by `ldmatrix`, and bytes 0
// and 2, 1 and 3 of a word widen together. So position 2 t of the 16 columns of an instruction holds column 4 t, and 2 t + 1, 2 t + 8, 2 t + 9
// hold 4 t + 2, 4 t + 1, 4 t + 3: even columns, then odd ones. Scales of a matrix lie beside each other in memory and come at once.
//
// GATED: rows of x are those of the pairs' tokens, and act(gate) * up is stored in float16 in the order of the sorted pairs, and of columns,
// which are those of x in the second GEMM. A warp reads its rows of weights in that order. The second GEMM stores sums times the weights of
// their pairs, each at the index of its pair, in bfloat16.
//
// Defined before this text: PAIRS (a multiple of 16), FEWER (of a tile that has no more pairs than these), STAGES, SLOTS (of the scales of a tile),
// SCALES (of a row), GATED, BIAS, ACT, EARLY and the rest of `fragments.cu`; ROWS (64 for each multiplying warpgroup), CLUSTER_M 1, SPLIT 1,
// LOADERS, LOAD_REGISTERS, BFLOAT16 (what is stored: not GATED); multiply() of both numbers of pairs; gemm/wgmma_parts.cu; grouped_parts.cu.

constexpr int MATRIX = 64, GROUPS = MULTIPLIERS / 128, MATRICES = 2 * GROUPS;  // rows of weights; warpgroups that multiply; of a tile
constexpr int OUTPUTS = GATED ? GROUPS * MATRIX : MATRICES * MATRIX;  // columns of the output of a tile
constexpr int DEPTH = 128, CODE_BYTES = DEPTH / 2;            // columns of a stage; bytes of a row of weights in it
constexpr int MATRIX_BYTES = MATRIX * CODE_BYTES, W_BYTES = MATRICES * MATRIX_BYTES;
constexpr int HALF_BYTES = PAIRS * 128, STAGE_BYTES = W_BYTES + 2 * HALF_BYTES;  // of 64 columns of x
constexpr int SCALE_BYTES_OF_MATRIX = MATRIX * SCALES, SLOT_BYTES = MATRICES * SCALE_BYTES_OF_MATRIX;
constexpr int PITCH = 48, STAGED = 32, STAGING_BYTES = STAGED * PITCH;  // bytes from pair to pair of a warp's results; pairs staged at once
constexpr int SCALES_AT = STAGES * STAGE_BYTES, STAGING_AT = SCALES_AT + SLOTS * SLOT_BYTES;
constexpr int BARRIERS_AT = STAGING_AT + MULTIPLIERS / 32 * STAGING_BYTES;


// A tile of pairs, of which `count` are real, by a tile of weights.
struct Item { int expert, tile, column, count; };

struct Work {
    Tiles tiles;
    int each, count;  // items of a tile of pairs; all of them

    __device__ __forceinline__ Work(const Tiles& tiles, int columns) : tiles(tiles) {
        each = (columns + OUTPUTS - 1) / OUTPUTS;
        count = *tiles.used * each;
    }
    __device__ __forceinline__ Item item(int i) const {
        const int tile = i / each;
        return {tiles.experts[tile], tile, i % each, min(tiles.places[2 * tile + 1], PAIRS)};
    }
};

// The first row of matrix `m` of an item in the weights of its expert, or -1 where it is past the last one. `rows`: of an expert.
__device__ __forceinline__ int first_row(const Item& item, int m, int rows) {
    if (GATED) {
        const int row = item.column * OUTPUTS + m / 2 * MATRIX;
        return row < rows / 2 ? row + m % 2 * (rows / 2) : -1;
    }
    const int row = item.column * OUTPUTS + m * MATRIX;
    return row < rows ? row : -1;
}

// cp.async.bulk: neighbouring bytes, a multiple of 16, which `barrier` counts.
__device__ __forceinline__ void load_bytes(u32 to, const u8* from, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from), "r"(bytes),
                 "r"(barrier)
                 : "memory");
}

__device__ __forceinline__ void store_shared(u32 to, uint4 v) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
__device__ __forceinline__ u32 load_scales(u32 from) {  // of two groups
    u16 both;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(both) : "r"(from) : "memory");
    return both;
}
// Four matrices of 8 x 8 numbers, transposed: lanes 8 i to 8 i + 7 have the addresses of the columns of matrix i.
__device__ __forceinline__ void store_transposed(u32 to, const u32 (&words)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared::cta.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(words[0]), "r"(words[1]),
                 "r"(words[2]), "r"(words[3])
                 : "memory");
}
__device__ __forceinline__ u32 max_signed2(u32 a, u32 b) {
    u32 out;
    asm("max.s16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
    return out;
}
__device__ __forceinline__ u32 add2(u32 a, u32 b) {
    u32 out;
    asm("add.u16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
    return out;
}
// The scales of two groups, a byte each, as float16 factors 2^15 times the scale over the largest of the row; what is less than 2^-14 becomes 0.
// `top`: 30 less that largest one, twice.
__device__ __forceinline__ u32 factors_of(u32 scales, u32 top) {
    return max_signed2(add2(__byte_perm(scales, 0, 0x4140), top), 0) << 10;
}
// Two numbers in float16 times the first factor of two, or the second.
template <bool SECOND> __device__ __forceinline__ u32 scaled(u32 x, u32 factors) {
    u32 y;
    if (SECOND)
        asm("{\n.reg .b16 low, high;\n.reg .b32 both;\nmov.b32 {low, high}, %2;\nmov.b32 both, {high, high};\nmul.rn.f16x2 %0, %1, both;\n}"
            : "=r"(y) : "r"(x), "r"(factors));
    else
        asm("{\n.reg .b16 low, high;\n.reg .b32 both;\nmov.b32 {low, high}, %2;\nmov.b32 both, {low, low};\nmul.rn.f16x2 %0, %1, both;\n}"
            : "=r"(y) : "r"(x), "r"(factors));
    return y;
}

// The loading warpgroup.
struct Loader {
    const u16* x;
    const u8* scales;
    const TensorMap* w_map;
    const Work& work;
    int rows, width, top_k;
    u32 data, barriers;

    __device__ __forceinline__ void run(int first, int step, Ring& ring) const {
        constexpr int COPIES = PAIRS * 8 / LOADERS, STRIDE = LOADERS / 8;  // of a thread: 16 bytes of so many rows, each so many further on
        const int member = threadIdx.x - MULTIPLIERS, row = member / 8, piece = member % 8;
        const int stages = (width + DEPTH - 1) / DEPTH, limit = width / 8;  // pieces of a row
        const u32 to = data + W_BYTES + row * 128 + (piece ^ row % 8) * 16;
        int slot = 0, round = 0;
        for (int i = first; i < work.count; i += step) {
            const Item item = work.item(i);
            int starts[MATRICES], boxes = 0;  // of the matrices among the rows of all experts; -1 past the last one
#pragma unroll
            for (int m = 0; m < MATRICES; m++) {
                starts[m] = first_row(item, m, rows);
                if (starts[m] >= 0) starts[m] += item.expert * rows, boxes++;
            }
            if (member == 0) load_item_scales(starts, boxes, slot, round);
            if (++slot == SLOTS) slot = 0, round++;
            u32 from[COPIES];
            bool in[COPIES];  // rows that are not there read as zeros
#pragma unroll
            for (int r = 0; r < COPIES; r++) {
                const int at = row + r * STRIDE, place = item.tile * PAIRS + at;
                from[r] = (u32)(at >= item.count ? 0 : GATED ? work.tiles.pairs[place] / top_k : place) * limit + piece;
                in[r] = at < item.count;
            }
            for (int s = 0; s < stages; s++, ring.next()) {
                ring.wait_empty();
                if (member == 0) {
                    barrier_expect(ring.full_here(), boxes * MATRIX_BYTES);
#pragma unroll
                    for (int m = 0; m < MATRICES; m++)
                        if (starts[m] >= 0)
                            load_box<false>(
                                ring.here() + m * MATRIX_BYTES, w_map, ring.full_here(), s * CODE_BYTES, starts[m], EVICT_NORMAL, 0
                            );
                }
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const bool inside = s * 16 + half * 8 + piece < limit;
#pragma unroll
                    for (int r = 0; r < COPIES; r++) {
                        const u32 at = to + ring.stage * STAGE_BYTES + half * HALF_BYTES + r * STRIDE * 128;
                        copy16<128>(at, (const uint4*)x + (inside ? from[r] + s * 16 + half * 8 : 0), inside && in[r]);
                    }
                }
                barrier_arrive_after_copies(ring.full_here());
            }
        }
    }
    __device__ __forceinline__ void load_item_scales(const int (&starts)[MATRICES], int boxes, int slot, int round) const {
        const u32 full = barriers + 16 * STAGES + 8 * slot, empty = full + 8 * SLOTS;
        if (round > 0) barrier_wait(empty, (round - 1) & 1);
        barrier_expect(full, boxes * SCALE_BYTES_OF_MATRIX);
#pragma unroll
        for (int m = 0; m < MATRICES; m++) {
            const u32 to = data + SCALES_AT + slot * SLOT_BYTES + m * SCALE_BYTES_OF_MATRIX;
            if (starts[m] >= 0) load_bytes(to, scales + (long)starts[m] * SCALES, SCALE_BYTES_OF_MATRIX, full);
        }
    }
};

// A multiplying warpgroup.
struct Multiplier {
    const Work& work;
    u16* out;
    const u16* bias;
    const float *pair_weights, *token_factors;
    int rows, columns, width, top_k;
    Gate act;
    u32 data, barriers;
    int group, warp, lane;  // of the block; of the group; of the warp

    __device__ __forceinline__ void release(u32 barrier) const {
        if (lane == 0) barrier_arrive(barrier);
    }
    // The row of the warp's 16 that this lane (g, t) has first (`high`: second) in the fragments.
    __device__ __forceinline__ int row_of(int high) const { return GATED ? lane / 4 * 2 + high : lane / 4 + 8 * high; }
    // The largest scales of this lane's rows of both matrices, of the second matrix in the upper halves. `scales`: of row 0 of the warp.
    __device__ __forceinline__ void find_largest(u32 (&largest)[2], u32 scales) const {
#pragma unroll
        for (int high = 0; high < 2; high++) {
            const u32 from = scales + row_of(high) * SCALES;
            u32 low_bytes = 0, words = 0;
#pragma unroll 4
            for (int j = 2 * (lane % 4); j < SCALES; j += 8) {
                const u32 both = load_scales(from + j) | load_scales(from + SCALE_BYTES_OF_MATRIX + j) << 16;
                words = max2(words, both), low_bytes = max2(low_bytes, both & 0x00FF00FF);
            }
            u32 most = max2(low_bytes, words >> 8 & 0x00FF00FF);
            most = max2(most, __shfl_xor_sync(~0u, most, 1));
            largest[high] = max2(most, __shfl_xor_sync(~0u, most, 2));
        }
    }
    // Sums of `N` pairs by both matrices of the group. `slot`: where the scales are; stages are released, the last one too.
    template <int N> __device__ __forceinline__ void multiply_item(
        float (&sums)[2][N / 2], const u32 (&largest)[2], u32 scales_of_warp, Ring& ring
    ) const {
        const int stages = (width + DEPTH - 1) / DEPTH;
        const int row = 16 * warp + (GATED ? lane % 8 * 2 + lane / 8 % 2 : lane % 16), chunk = lane / 16;  // whose 16 bytes `matrices` gets
        const u32 codes = 2 * group * MATRIX_BYTES + row * CODE_BYTES, first = (chunk ^ (row / 2 & 3)) * 16, second = first ^ 32;
        u32 fragments[2][2][4], tops[2][2], scales[2];
        int stage = __shfl_sync(~0u, ring.stage, 0), before = 0;  // known to be the same in all lanes: descriptors stay in uniform registers
#pragma unroll
        for (int high = 0; high < 2; high++) {
            scales[high] = scales_of_warp + row_of(high) * SCALES;
#pragma unroll
            for (int q = 0; q < 2; q++) tops[q][high] = __byte_perm(30 - (largest[high] >> 16 * q & 0xFF), 0, 0x1010);
        }
#pragma unroll 1
        for (int s = 0; s < stages; s++) {
            ring.wait_full();
            fence_async();  // wgmma reads what cp.async has written
            const u32 here = data + stage * STAGE_BYTES;
            const u64 x = descriptor(here + W_BYTES), constant = x & ~0xFFFFFFFFull;  // offsets never reach the upper half
#pragma unroll
            for (int half = 0; half < 2; half++) {
                uint4 words[2];
                u32 factors[2][2];
#pragma unroll
                for (int q = 0; q < 2; q++) {
                    words[q] = matrices(here + codes + q * MATRIX_BYTES + (half ? second : first));
#pragma unroll
                    for (int high = 0; high < 2; high++) {  // past the last column, codes are zeros, whose scale must be finite
                        const u32 two = SCALES % 4 == 0 || 4 * s + 2 * half < SCALES
                            ? load_scales(scales[high] + q * SCALE_BYTES_OF_MATRIX + 4 * s + 2 * half)
                            : 0;
                        factors[q][high] = factors_of(two, tops[q][high]);
                    }
                }
#pragma unroll
                for (int k = 0; k < 4; k++) {  // 16 columns each: the first codes of 16 bytes, then the second ones, then those of the next 16 bytes
                    u32(&pieces)[2][4] = fragments[k % 2];
#pragma unroll
                    for (int q = 0; q < 2; q++)
#pragma unroll
                        for (int high = 0; high < 2; high++) {
                            const u32 word = k < 2 ? high ? words[q].y : words[q].x : high ? words[q].w : words[q].z;
                            const uint2 two = k % 2 ? widen_second_e2m1(word) : widen_first_e2m1(word);
                            pieces[q][high] = k < 2 ? scaled<false>(two.x, factors[q][high]) : scaled<true>(two.x, factors[q][high]);
                            pieces[q][2 + high] = k < 2 ? scaled<false>(two.y, factors[q][high]) : scaled<true>(two.y, factors[q][high]);
                        }
                    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
                    for (int q = 0; q < 2; q++)
                        multiply(sums[q], pieces[q], constant | (u32)x + half * (HALF_BYTES / 16) + k * 2, s > 0 || half > 0 || k > 0);
                    asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 1;" ::: "memory");
                    if (half == 0 && k == 0 && s > 0) release(ring.empty + before * 8);  // nothing of the stage before is read any more
                }
            }
            before = stage;
            stage = stage + 1 == STAGES ? 0 : stage + 1;
            ring.next();
        }
        asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
        release(ring.empty + before * 8);
#pragma unroll
        for (int q = 0; q < 2; q++)
#pragma unroll
            for (int j = 0; j < N / 2; j++) asm volatile("" : "+f"(sums[q][j])::"memory");
    }
    __device__ __forceinline__ float bias_of(const Item& item, int row) const {
        return BIAS && row < rows ? of_bf16(bias[(long)item.expert * rows + row]) : 0.0f;
    }
    template <int N> __device__ __forceinline__ void run_item(const Item& item, Ring& ring, u32 slot) const {
        constexpr int CHUNKS = (N + STAGED - 1) / STAGED;
        float sums[2][N / 2];
        u32 largest[2];
        const u32 scales = slot + (2 * group * MATRIX + 16 * warp) * SCALES;
        find_largest(largest, scales);
        multiply_item<N>(sums, largest, scales, ring);
        const int t = lane % 4, own = first_row(item, 2 * group, rows) + 16 * warp;  // row 0 of the warp in the first matrix
        float biases[2][2], row_factors[2][2];
#pragma unroll
        for (int q = 0; q < 2; q++)
#pragma unroll
            for (int high = 0; high < 2; high++) {
                biases[q][high] = bias_of(item, own + q * (GATED ? rows / 2 : MATRIX) + row_of(high));
                row_factors[q][high] = __uint_as_float((u32)max((int)(largest[high] >> 16 * q & 0xFF) - 1, 0) << 23);
            }
        const u32 staging = data + STAGING_AT + (4 * group + warp) * STAGING_BYTES;
#pragma unroll
        for (int c = 0; c < CHUNKS; c++) {
            if (STAGED * c >= item.count) continue;
            constexpr int EIGHTS = N < STAGED ? N / 8 : STAGED / 8;  // of pairs
            // Of one pair in each lane: its row of the output, and what its sums are multiplied by.
            const int own_at = STAGED * c + lane, place = item.tile * PAIRS + own_at, pair = own_at < item.count ? work.tiles.pairs[place] : 0;
            const int target = own_at >= item.count ? -1 : GATED ? place : pair;
            const float own_factor = GATED ? token_factors[pair / top_k] : pair_weights[pair];
#pragma unroll
            for (int q = 0; q < (GATED ? 1 : 2); q++) {
                const int row = own + q * MATRIX;  // of the output's columns, of this warp's 16
                if (!GATED && first_row(item, 2 * group + q, rows) < 0) continue;
                u32 words[EIGHTS][2];
#pragma unroll
                for (int b = 0; b < EIGHTS; b++) {
                    if (STAGED / 8 * c + b >= N / 8) continue;
                    float v[4];
#pragma unroll
                    for (int j = 0; j < 4; j++) {
                        const int at = (STAGED / 8 * c + b) * 4 + j;
                        const float factor = __shfl_sync(~0u, own_factor, 8 * b + 2 * t + j % 2);
                        if (GATED)
                            v[j] = activate(
                                sums[0][at] * (row_factors[0][j / 2] * factor) + biases[0][j / 2],
                                sums[1][at] * (row_factors[1][j / 2] * factor) + biases[1][j / 2], act.alpha, act.limit
                            );
                        else v[j] = (sums[q][at] * row_factors[q][j / 2] + biases[q][j / 2]) * factor;
                    }
                    words[b][0] = narrow(v[0], v[1]), words[b][1] = narrow(v[2], v[3]);
                }
                __syncwarp();  // what was staged before has been read
#pragma unroll
                for (int b = 0; b < EIGHTS; b += 2) {
                    if (STAGED / 8 * c + b >= N / 8) continue;
                    const u32 four[4] = {words[b][0], words[b][1], words[(b + 1) % EIGHTS][0], words[(b + 1) % EIGHTS][1]};
                    store_transposed(staging + (8 * (b + lane / 16) + lane % 8) * PITCH + lane / 8 % 2 * 16, four);
                }
                __syncwarp();
#pragma unroll
                for (int pass = 0; pass < (8 * EIGHTS + 15) / 16; pass++) {
                    const int at = 16 * pass + lane / 2;
                    const int to = __shfl_sync(~0u, target, at);
                    const uint4 v = load_shared(staging + at * PITCH + lane % 2 * 16);
                    if (to >= 0) store16(out + (long)to * columns + row + lane % 2 * 8, v);
                }
            }
        }
    }
    __device__ __forceinline__ void run(int first, int step, Ring& ring) const {
        int slot = 0, round = 0;
        for (int i = first; i < work.count; i += step) {
            const Item item = work.item(i);
            const u32 full = barriers + 16 * STAGES + 8 * slot, empty = full + 8 * SLOTS, scales = data + SCALES_AT + slot * SLOT_BYTES;
            barrier_wait(full, round & 1);
            if (first_row(item, 2 * group, rows) < 0) {
                for (int s = 0; s < (width + DEPTH - 1) / DEPTH; s++, ring.next()) {
                    ring.wait_full();
                    release(ring.empty_here());
                }
            } else if (FEWER < PAIRS && item.count <= FEWER) {
                run_item<FEWER>(item, ring, scales);
            } else {
                run_item<PAIRS>(item, ring, scales);
            }
            release(empty);
            if (++slot == SLOTS) slot = 0, round++;
        }
    }
};

extern "C" __global__ void __launch_bounds__(MULTIPLIERS + LOADERS, 1) mxfp4_gemm(
    const u16* x, const __grid_constant__ TensorMap w_map, const u8* scales, const Tiles tiles, u16* out, const u16* bias,
    const float* pair_weights, const float* token_factors, int rows, int columns, int width, int top_k, const Gate act
) {
    extern __shared__ __align__(1024) char shared[];
    const u32 data = shared_address(shared), barriers = data + BARRIERS_AT;
    Ring ring(data, barriers, STAGE_BYTES, STAGES);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if constexpr (EARLY) launch_next();
    if (threadIdx.x == 0) {
        if (data % 1024 != 0) asm volatile("trap;");  // the swizzle counts from there
        for (int s = 0; s < STAGES; s++) {
            barrier_init(ring.full + s * 8, LOADERS + 1);  // with their copies, and the thread that expects the boxes
            barrier_init(ring.empty + s * 8, MULTIPLIERS / 32);
        }
        for (int s = 0; s < SLOTS; s++) {
            barrier_init(barriers + 16 * STAGES + s * 8, 1);
            barrier_init(barriers + 16 * STAGES + (SLOTS + s) * 8, MULTIPLIERS / 32);
        }
        publish_barriers();
    }
    __syncthreads();
    wait_for_previous();  // for the table, on which the weights depend too
    const Work work(tiles, columns);
    const int first = blockIdx.x, step = gridDim.x;
    if (warp >= MULTIPLIERS / 32) {
        leave_registers<LOAD_REGISTERS>();
        Loader{x, scales, &w_map, work, rows, width, top_k, data, barriers}.run(first, step, ring);
        return;
    }
    take_registers<MULTIPLY_REGISTERS>();
    const Multiplier multiplier{
        work, out, bias, pair_weights, token_factors, rows, columns, width, top_k, act, data, barriers, warp / 4, warp % 4, lane
    };
    multiplier.run(first, step, ring);
}
