// One of the two grouped GEMMs of experts for many tokens: tiles of ROWS pairs of one expert by TILE rows of its weights (WGMMA).
//
// GATED, the first: rows of x are gathered by the tokens of the pairs, and act(gate) * up is stored in the order of the sorted pairs, which
// is the order of rows of x in the second. That stores rows times the weights of their pairs, each at the index of its pair.
//
// A warpgroup loads a ring of stages: weights and sorted rows by TMA, gathered rows by cp.async into the same swizzle, because a box of
// Hopper's TMA has neighbouring rows. Two or three warpgroups multiply 64 pairs each. With OVERLAP, each stores an item while it multiplies
// the next one, so the tensor cores do not wait for stores.
//
// With ELEMENT = 1, x and the weights are e4m3. Sums of 128 columns by 128 rows of weights are multiplied by their scales, then added up:
// both halves of a tile one after the other, because a thread has the registers for one half beside its sums. The first GEMM stores e4m3
// with a scale for each row and tile, which is 128 columns of the second.
//
// Defined before this text: ROWS (128 or 192), TILE, CLUSTER_M, STAGES, STORED, ELEMENT (bytes), GATED, ACT, BFLOAT16, BIAS, EARLY,
// LOADERS, LOAD_REGISTERS, CLAIM, OVERLAP; multiply(); gemm/wgmma_parts.cu, grouped_work.cu and grouped_output.cu.

constexpr int DEPTH = ROW_BYTES / ELEMENT;  // columns of a stage
constexpr int X_BYTES = ROWS * ROW_BYTES, W_BYTES = TILE * ROW_BYTES, STAGE_BYTES = X_BYTES + W_BYTES;
constexpr int X_BOX = CLAIM ? 64 : ROWS, X_BOX_BYTES = X_BOX * ROW_BYTES;  // rows of x; those of warpgroups without pairs are not loaded
constexpr int BOX_ROWS = TILE / 2;  // of weights; in the first GEMM one box holds gates, the other one ups
constexpr int BARRIERS = STAGES * STAGE_BYTES + ROWS * PITCH, CLAIMS = BARRIERS + 256;
static_assert(ELEMENT == 2 || (TILE == 2 * SCALE_BLOCK && STORED * 2 == SCALE_BLOCK));
static_assert(!OVERLAP || (ELEMENT == 2 && ROWS == 128));

__device__ __forceinline__ void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Arrive at the barrier once the copies of this thread so far have ended.
__device__ __forceinline__ void barrier_arrive_after_copies(u32 barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
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
    Queue queue(data + CLAIMS);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int n_tiles = (columns + OUTPUTS - 1) / OUTPUTS, steps = (width + DEPTH - 1) / DEPTH;
    const int first = blockIdx.x / CLUSTER_M, step = gridDim.x / CLUSTER_M;
    if constexpr (EARLY) launch_next();
    if (threadIdx.x == 0) {
        if (data % 1024 != 0) asm volatile("trap;");  // the swizzle counts from there
        for (int s = 0; s < STAGES; s++) {
            // A thread expects the boxes, and all that gather arrive with their copies.
            barrier_init(ring.full + s * 8, GATED ? LOADERS + 1 : 1);
            barrier_init(ring.empty + s * 8, MULTIPLIERS / 32 * CLUSTER_M);
        }
        if constexpr (CLAIM) queue.init();
        publish_barriers();
    }
    if constexpr (CLUSTER_M > 1) cluster_sync<false>();
    else __syncthreads();
    wait_for_previous();  // for the table, on which the weights depend too
    const Work work(tiles, n_tiles);
    auto advance = [&](int& i, Entry& entry) {
        if constexpr (CLAIM) {
            const Claim claim = queue.take();
            i = claim.index, entry = claim.entry;
        } else {
            i += step;
        }
    };

    if (warp >= MULTIPLIERS / 32) {
        leave_registers<LOAD_REGISTERS>();
        const int member = threadIdx.x - MULTIPLIERS;
        const Weights weights = {&w_map, rows, columns, work.block};
        const bool claims = work.block == 0 && member == 0;
        Claim next;
        Entry entry = CLAIM ? work.entry(first) : Entry{};
#if GATED
        constexpr int COPIES = ROWS * 8 / LOADERS, STRIDE = LOADERS / 8;  // of a thread: 16 bytes of so many rows, each so many further on
        const int row = member / 8, piece = member % 8;
        const u32 to = data + row * ROW_BYTES + (piece ^ row % 8) * 16;
        const int limit = width * ELEMENT / 16;
        for (int i = first; i < work.count; advance(i, entry)) {
            const Item item = work.item(i, CLAIM ? entry : work.entry(i));
            if (CLAIM && member == 0) queue.expect();
            u32 from[COPIES];
#pragma unroll
            for (int r = 0; r < COPIES; r++) {
                const int at = row + r * STRIDE;
                from[r] = (u32)(at < item.rows ? tiles.pairs[item.tile * ROWS + at] / top_k : 0) * limit + piece;
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
                    if (r * STRIDE >= X_BOX && item.rows <= r * STRIDE / X_BOX * X_BOX) continue;
                    const u32 at = to + ring.stage * STAGE_BYTES + r * STRIDE * ROW_BYTES;
                    copy16<128>(at, (const uint4*)x + (inside ? from[r] + s * 8 : 0), inside);
                }
                barrier_arrive_after_copies(ring.full_here());
                if (CLAIM && claims) queue.claim(next, s, steps, work);
            }
        }
#else
        if (member > 0) return;
        for (int i = first; i < work.count; advance(i, entry)) {
            const Item item = work.item(i, CLAIM ? entry : work.entry(i));
            if constexpr (CLAIM) queue.expect();
            const int boxes = CLAIM ? (item.rows + X_BOX - 1) / X_BOX : 1;
            for (int s = 0; s < steps; s++, ring.next()) {
                ring.wait_empty();
                barrier_expect(ring.full_here(), boxes * X_BOX_BYTES + W_BYTES);
                for (int box = 0; box < boxes; box++) {
                    const u32 at = ring.here() + box * X_BOX_BYTES;
                    load_box<false>(at, &x_map, ring.full_here(), s * DEPTH, item.tile * ROWS + box * X_BOX, EVICT_NORMAL, 0);
                }
                weights.load(item, ring.here() + X_BYTES, ring.full_here(), s * DEPTH);
                if (CLAIM && claims) queue.claim(next, s, steps, work);
            }
        }
#endif
        // A block must not end before the other has released its stages.
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
#if OVERLAP
    Held held = {};
#endif
    Entry entry = work.entry(first);
    for (int i = first; i < work.count;) {
        const Item item = work.item(i, entry);
        if constexpr (!CLAIM) entry = work.entry(i + step);  // on its way during this item, as the pairs are
        const int valid = item.rows - group * 64, top = item.tile * ROWS + group * 64;
        if (valid <= 0) {
            for (int s = 0; s < steps; s++, ring.next()) {
                ring.wait_full();
                release(ring.stage);
            }
            advance(i, entry);
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
        int before = 0, s = 0;
        auto multiply_stage = [&]() {
            wait_stage();
            const u64 x_here = descriptor(ring.here() + group * 64 * ROW_BYTES), w_here = descriptor(ring.here() + X_BYTES);
#pragma unroll
            for (int k = 0; k < ROW_BYTES / 32; k++) multiply(sums, x_here + k * 2, w_here + k * 2, s > 0 || k > 0);
            asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 1;" ::: "memory");
            if (s > 0) release(before);
            before = ring.stage;
            ring.next();
        };
#if OVERLAP
#pragma unroll
        for (; s < PARTS; s++) {
            multiply_stage();
            // A branch, or the assembler gates columns between the multiplications.
            if (held.valid > 0) output.store_part(held, s);
        }
        load_factors();
        for (; s < steps; s++) multiply_stage();
#else
        for (; s < steps; s++) multiply_stage();
        load_factors();  // while the tensor cores multiply by the last columns
#endif
        advance(i, entry);
        asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
        release(before);
        __syncwarp();  // or the assembler gates sums before the release
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
        advance(i, entry);
        __syncwarp();
#endif
        if constexpr (QUANTIZES) {
            output.store_quantized(sums, item, top + warp_row, valid - warp_row, scales, scale);
        } else {
            const int sorted = top + warp_row + lane / 4, targets[2] = {GATED ? sorted : pairs[0], GATED ? sorted + 8 : pairs[1]};
#if OVERLAP
            output.keep(held, sums, item, targets, valid - warp_row, weight);
#else
            output.store(sums, item, targets, valid - warp_row, scale, weight);
#endif
        }
    }
#if OVERLAP
#pragma unroll
    for (int part = 0; part < PARTS; part++) output.store_part(held, part);
#endif
}
