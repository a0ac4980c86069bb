// One of the two grouped GEMMs of experts that convert weights on their way to the tensor cores: tiles of up to PAIRS pairs of one expert by
// some matrices of 64 rows of its weights (WGMMA).
//
// Weights are the left operand, in registers: each is read from shared memory and converted to 16 bits once per tile of pairs, by the file of its
// format. Rows of x are the right operand, in shared memory. Each multiplying warpgroup has two matrices; with GATED, the first GEMM, these are
// 64 rows of gates and the ups of the same columns.
//
// A warp loads a ring of stages of 128 columns by TMA. Rows of x are in the order of the sorted pairs, and their columns in the order in which
// lanes get weights. Of each 16 columns, lane (g, t) of a warp gets columns 4 t to 4 t + 3 by `ldmatrix`, and the even ones widen together, as do
// the odd ones. So position 2 t of the 16 columns of an instruction holds column 4 t, and 2 t + 1, 2 t + 8, 2 t + 9 hold 4 t + 2, 4 t + 1,
// 4 t + 3: even columns, then odd ones.
//
// GATED: rows of x, which `widened_rows.cu` has prepared in float16, are the pairs' tokens, and act(gate) * up is stored in the order of x in the
// second GEMM. The second GEMM stores sums times the weights of their pairs, each at the index of its pair, in bfloat16. Its x may be prepared
// too, so that its rows have factors (PREPARED).
//
// Defined before this text: FEWER (of a tile that has no more pairs than these), BIAS, ACT, EARLY and the rest of `fragments.cu`; 1 as CLUSTER_M,
// CLUSTER_N and SPLIT; X_STRIP (rows of a box of x), LOADERS, LOAD_REGISTERS, BFLOAT16 (what is stored), PREPARED; multiply() of both numbers of
// pairs; widened_tiles.cu; the file of the format.

constexpr int PITCH = 48, STAGED = 32, STAGING_BYTES = STAGED * PITCH;  // bytes from pair to pair of a warp's results; pairs staged at once
constexpr int STAGING_AT = SCALES_AT + SCALE_BYTES;
constexpr int BARRIERS_AT = STAGING_AT + MULTIPLIERS / 32 * STAGING_BYTES;

// Four matrices of 8 x 8 numbers, transposed: lanes 8 i to 8 i + 7 have the addresses of the columns of matrix i.
__device__ __forceinline__ void store_transposed(u32 to, const u32 (&words)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared::cta.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(words[0]), "r"(words[1]),
                 "r"(words[2]), "r"(words[3])
                 : "memory");
}
// Eight of a warp's 16 results for a pair, which begin at `from`. GATED: the even or the odd ones, otherwise the lower or the upper half.
__device__ __forceinline__ uint4 load_results(u32 from, int second) {
    if (!GATED) return load_shared(from + second * 16);
    const uint4 low = load_shared(from), high = load_shared(from + 16);
    const u32 pick = second ? 0x7632 : 0x5410;
    return make_uint4(
        __byte_perm(low.x, low.y, pick), __byte_perm(low.z, low.w, pick), __byte_perm(high.x, high.y, pick), __byte_perm(high.z, high.w, pick)
    );
}

// The first warp of the loading warpgroup.
struct Loader {
    const TensorMap *x_map, *w_map;
    const Work& work;
    int rows, width, lane;

    __device__ __forceinline__ void run(Ring& ring, ScaleLoader& scales) const {
        constexpr int STRIP_BYTES = X_STRIP * ROW_BYTES;
        static_assert(2 * PAIRS / X_STRIP <= 32, "a lane loads one box of x");
        const int stages = stages_of(width), half = lane % 2, strip = lane / 2;
        for (Items items(work); items.inside();) {
            const Item item = items.next();
            int starts[MATRICES], boxes = 0;  // of the matrices among the rows of all experts; -1 if the item has fewer
#pragma unroll
            for (int m = 0; m < MATRICES; m++) {
                starts[m] = first_row(item, m, rows);
                if (starts[m] >= 0) starts[m] += item.expert * rows, boxes++;
            }
            scales.load_item(item, starts, boxes, rows, lane);
            const int strips = (item.count + X_STRIP - 1) / X_STRIP;  // what follows them in the tile is not stored
            for (int s = 0; s < stages; s++, ring.next()) {
                ring.wait_empty();
                if (lane == 0) {
                    barrier_expect(ring.full_here(), boxes * MATRIX_BYTES + strips * 2 * STRIP_BYTES);
#pragma unroll
                    for (int m = 0; m < MATRICES; m++)
                        if (starts[m] >= 0)
                            load_box<false>(
                                ring.here() + m * MATRIX_BYTES, w_map, ring.full_here(), s * CODE_BYTES, starts[m] / STRIP, EVICT_NORMAL, 0
                            );
                }
                __syncwarp();
                if (strip < strips)
                    load_box<false>(
                        ring.here() + W_BYTES + half * HALF_BYTES + strip * STRIP_BYTES, x_map, ring.full_here(), (2 * s + half) * COLUMNS,
                        item.tile * PAIRS + strip * X_STRIP, EVICT_NORMAL, 0
                    );
                scales.load_stage(ring, s, lane);
            }
        }
    }
};

// A multiplying warpgroup.
struct Multiplier {
    const Work& work;
    u16* out;
    const u16* bias;
    const float *pair_weights, *x_factors;
    int rows, columns, width;
    Gate act;
    u32 data;
    int group, warp, lane;  // of the block; of the group; of the warp

    __device__ __forceinline__ float bias_of(const Item& item, int row) const {
        return BIAS && row < rows ? of_bf16(bias[(long)item.expert * rows + row]) : 0.0f;
    }
    template <int N> __device__ __forceinline__ void run_item(const Item& item, Ring& ring, const Widener& widener) const {
        constexpr int CHUNKS = (N + STAGED - 1) / STAGED;
        float sums[2][N / 2], row_factors[2][2], biases[2][2], factors[CHUNKS], weights[CHUNKS];
        int targets[CHUNKS];  // of one pair in each lane: its row of the output, the factor of its row of x, and its weight
#pragma unroll
        for (int c = 0; c < CHUNKS; c++) {
            const int at = STAGED * c + lane, place = item.tile * PAIRS + at;
            targets[c] = at >= item.count ? -1 : GATED ? place : work.tiles.pairs[place];
            factors[c] = at >= item.count ? 0.0f : PREPARED ? x_factors[place] : 1.0f;
            weights[c] = GATED || at >= item.count ? 0.0f : pair_weights[targets[c]];
        }
        const int t = lane % 4, own = first_row(item, 2 * group, rows) + 16 * warp;  // row 0 of the warp in the first matrix
#pragma unroll
        for (int q = 0; q < 2; q++)
#pragma unroll
            for (int high = 0; high < 2; high++)
                biases[q][high] = bias_of(item, own + q * (GATED ? rows / 2 : MATRIX) + fragment_row(lane, high));
        widener.multiply_item<N>(sums, row_factors, ring);
        const u32 staging = data + STAGING_AT + (4 * group + warp) * STAGING_BYTES;
#pragma unroll
        for (int c = 0; c < CHUNKS; c++) {
            if (STAGED * c >= item.count) continue;
            constexpr int EIGHTS = N < STAGED ? N / 8 : STAGED / 8;  // of pairs
            float own_factors[EIGHTS][2], own_weights[EIGHTS][2];    // of the pairs in this lane's sums
#pragma unroll
            for (int b = 0; b < EIGHTS; b++)
#pragma unroll
                for (int odd = 0; odd < 2; odd++) {
                    own_factors[b][odd] = PREPARED ? __shfl_sync(~0u, factors[c], 8 * b + 2 * t + odd) : 1.0f;
                    own_weights[b][odd] = GATED ? 1.0f : __shfl_sync(~0u, weights[c], 8 * b + 2 * t + odd);
                }
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
                        const float factor = own_factors[b][j % 2];
                        if (GATED)
                            v[j] = activate(
                                sums[0][at] * (row_factors[0][j / 2] * factor) + biases[0][j / 2],
                                sums[1][at] * (row_factors[1][j / 2] * factor) + biases[1][j / 2], act.alpha, act.limit
                            );
                        else v[j] = (sums[q][at] * (row_factors[q][j / 2] * factor) + biases[q][j / 2]) * own_weights[b][j % 2];
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
                    const int to = __shfl_sync(~0u, targets[c], at);
                    const uint4 v = load_results(staging + at * PITCH, lane % 2);
                    if (to >= 0) store16(out + (long)to * columns + row + lane % 2 * 8, v);
                }
            }
        }
    }
    __device__ __forceinline__ void run(Ring& ring, Widener& widener) const {
        for (Items items(work); items.inside();) {
            const Item item = items.next();
            widener.begin_item();
            if (first_row(item, 2 * group, rows) < 0) {
                for (int s = 0; s < stages_of(width); s++, ring.next()) {
                    ring.wait_full();
                    release(ring.empty_here(), lane);
                }
            } else if (FEWER < PAIRS && item.count <= FEWER) {
                run_item<FEWER>(item, ring, widener);
            } else {
                run_item<PAIRS>(item, ring, widener);
            }
            widener.end_item();
        }
    }
};

extern "C" __global__ void __launch_bounds__(MULTIPLIERS + LOADERS, 1) widened_experts(
    const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap w_map, const Scales scales, const Tiles tiles, u16* out,
    const u16* bias, const float* pair_weights, const float* x_factors, int rows, int columns, int width, const Gate act
) {
    extern __shared__ __align__(1024) char shared[];
    const u32 data = shared_address(shared), barriers = data + BARRIERS_AT;
    Ring ring(data, barriers, STAGE_BYTES, STAGES);
    const Slots slots(data, barriers + 16 * STAGES);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if constexpr (EARLY) launch_next();
    if (threadIdx.x == 0) {
        if (data % 1024 != 0) asm volatile("trap;");  // the 128-byte swizzle needs stages aligned to 1024 bytes
        for (int s = 0; s < STAGES; s++) {
            barrier_init(ring.full + s * 8, 1 + SCALE_COPIERS);  // one that expects the bytes of the boxes, others after their copies of scales
            barrier_init(ring.empty + s * 8, MULTIPLIERS / 32);
        }
        slots.init();
        publish_barriers();
    }
    __syncthreads();
    wait_for_previous();  // for the table of tiles, which also selects the weights
    const Work work(tiles, columns);
    if (warp >= MULTIPLIERS / 32) {
        leave_registers<LOAD_REGISTERS>();
        if (warp > MULTIPLIERS / 32) return;
        ScaleLoader scale_loader{scales, slots};
        Loader{&x_map, &w_map, work, rows, width, lane}.run(ring, scale_loader);
        return;
    }
    take_registers<MULTIPLY_REGISTERS>();
    Widener widener{slots, data, width, warp / 4, warp % 4, lane};
    Multiplier{work, out, bias, pair_weights, x_factors, rows, columns, width, act, data, warp / 4, warp % 4, lane}.run(ring, widener);
}
