// out = epilogue(x @ w.T) (epilogue.py). A block computes tiles of ROWS rows of x by TILE rows of w, one after another.
//
// One thread issues TMA loads of boxes of 64 columns of x and of w into a ring of stages; one to three warpgroups multiply what has arrived
// (wgmma: x is the left operand, w the right one) and run the epilogue. Weights depend on nothing, so the ring is filled with them
// while the previous kernel still runs (programmatic dependent launch); loads of x wait for that kernel to end.
//
// SPLIT blocks of a cluster share the columns of one tile; their sums meet in shared memory and are added in order.
//
// Norms before and after the GEMM need no kernel of their own (deferred_norm.py): with SCALE, each row of sums is divided by the root mean
// square of its row of x; with DEFER, the new residual stream is also stored times the gain of the next norm, with its sums of squares.
//
// Defined before this text: ROWS (64, 128 or 192), TILE, SPLIT, SHARERS = SPLIT, CLUSTER_M, CLUSTER_N, LOADERS (threads), LOAD_REGISTERS,
// MOST_STAGES, BFLOAT16, BIAS, EARLY, WRITE, ARGMAX, STORE, SCALE, DEFER; multiply(), the one instruction whose operands depend on TILE;
// wgmma_parts.cu and wgmma_output.cu.

constexpr int W_BYTES = TILE * ROW_BYTES;
// Each of the CLUSTER_M blocks loads a slice of w, and each of the CLUSTER_N blocks one of x. With GATED the slice of w is of the gates or of the
// ups if CLUSTER_M is even, otherwise of both.
constexpr int W_BOXES = CLUSTER_M % HALVES == 0 ? 1 : HALVES;
constexpr int W_SLICE = TILE / CLUSTER_M / W_BOXES;

// The first row to load for the tile of `size` rows at `start`, of `count` rows in all. TMA fills rows past the end with zeros slowly, so the last
// tile begins early enough to end at the last row. It computes some rows a second time, and stores only those from `start` on.
__device__ __forceinline__ int first_of(int start, int size, int count) { return max(min(start, count - size), 0); }

extern "C" __global__ void __launch_bounds__(MULTIPLIERS + LOADERS, 1)
wgmma_gemm(const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap w_map, void* out, int* partial, const u16* bias,
           Norms norms, int rows, int columns, int width, int x_rows, int stages) {
    extern __shared__ char unaligned[];
    __shared__ u64 barriers[2 * MOST_STAGES + (SPLIT > 1)];
    const u32 data = (shared_address(unaligned) + 1023) & ~1023u;
    // A stage is a box of x, then one of w. Fewer rows of x may be loaded than are computed: the others hold arbitrary data, and their
    // results are not stored.
    const u32 x_bytes = x_rows * ROW_BYTES, arrived = shared_address(barriers + 2 * MOST_STAGES);
    Ring ring(data, shared_address(barriers), x_bytes + W_BYTES, stages);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const Place place;
    const int n_tiles = (columns + OUTPUTS - 1) / OUTPUTS;
    Walk walk((rows + ROWS - 1) / ROWS, n_tiles);
    const int k_boxes = (width + COLUMNS - 1) / COLUMNS;
    const int k_each = (k_boxes + SPLIT - 1) / SPLIT, k_first = place.part * k_each;
    const int steps = max(min(k_each, k_boxes - k_first), 0);
    if constexpr (EARLY) launch_next();
    if (threadIdx.x == 0) {
        ring.init();
        if constexpr (SPLIT > 1) barrier_init(arrived, 1);
        publish_barriers();
        if constexpr (SPLIT > 1) expect_sums<GROUPS, OWN_GROUPS>(arrived, place);
    }
    if constexpr (SET > 1) cluster_sync<false>();
    else __syncthreads();

    if (warp >= MULTIPLIERS / 32) {
        leave_registers<LOAD_REGISTERS>();
        if (threadIdx.x == MULTIPLIERS) {
            // Weights are evicted from L2 first, except if other clusters read them too, or if float32 results fill L2 as fast as weights leave it.
            const bool once = walk.m_groups == 1;
            const u64 w_policy = once && WRITE != FLOAT ? EVICT_FIRST : EVICT_NORMAL, x_policy = once ? EVICT_LAST : EVICT_NORMAL;
            const u16 w_mask = place.w_mask(), x_mask = place.x_mask();
            const int x_slice = place.n * (x_rows / CLUSTER_N);
            auto load_x = [&](int s) {
                const int row = first_of(walk.m_tile(place) * ROWS, x_rows, rows) + x_slice;
                load_box<(CLUSTER_N > 1)>(ring.here() + x_slice * ROW_BYTES, &x_map, ring.full_here(), (k_first + s) * COLUMNS, row, x_policy,
                                          x_mask);
            };
            auto load_w = [&](int s) {
                barrier_expect(ring.full_here(), x_bytes + W_BYTES);
                const int first = first_of(walk.n_tile(place) * OUTPUTS, OUTPUTS, columns);
#pragma unroll
                for (int box = 0; box < W_BOXES; box++) {
                    const int row = box * OUTPUTS + place.m * W_SLICE;  // of the tile: gates, then ups
                    load_box<(CLUSTER_M > 1)>(ring.here() + x_bytes + row * ROW_BYTES, &w_map, ring.full_here(), (k_first + s) * COLUMNS,
                                              row / OUTPUTS * columns + first + row % OUTPUTS, w_policy, w_mask);
                }
            };
            int ahead = min(steps, stages);
            const Ring start = ring;
            for (int s = 0; s < ahead; s++, ring.next()) load_w(s);
            wait_for_previous();
            ring = start;
            for (int s = 0; s < ahead; s++, ring.next()) load_x(s);
            for (; walk.inside(); walk.next(), ahead = 0) {
                for (int s = ahead; s < steps; s++, ring.next()) {
                    ring.wait_empty();
                    load_w(s);
                    load_x(s);
                }
            }
            // The block must not exit before the other blocks' warps have arrived at its `empty` barriers for the last time.
            if constexpr (SET > 1) {
                for (int s = 0; s < stages; s++, ring.next()) ring.wait_empty();
            }
        }
        if constexpr (SPLIT > 1) cluster_sync<false>();
        return;
    }

    take_registers<MULTIPLY_REGISTERS>();
    const int group = warp / 4, row_in_tile = group * 64 + warp % 4 * 16 + lane / 4;
    const u32 peer_empty = SET > 1 ? address_in(ring.empty, place.part * SET + min(lane, SET - 1)) : ring.empty;
    auto release = [&](int stage) {
        if constexpr (SET == 1) {
            if (lane == 0) barrier_arrive(peer_empty + stage * 8);
        } else {
            if (lane < SET) barrier_arrive_in_cluster(peer_empty + stage * 8);
        }
    };
    Output output = {out, bias, norms, rows, columns, first_of(walk.m_tile(place) * ROWS, x_rows, rows) + row_in_tile};
    wait_for_previous();
    if constexpr (SCALE) output.find_scale(width);
    for (; walk.inside(); walk.next()) {
        const int n_tile = walk.n_tile(place);
        output.least_row = walk.m_tile(place) * ROWS, output.least_column = n_tile * OUTPUTS;
        const int row = first_of(output.least_row, x_rows, rows) + row_in_tile;
        const bool other_rows = row != output.row;
        output.row = row;
        output.column = first_of(output.least_column, OUTPUTS, columns) + place.part * OWN_GROUPS * 8 + lane % 4 * 2;
        const Before before_sums = output.before();
        float sums[TILE / 2];
#pragma unroll
        for (int i = 0; i < TILE / 2; i++) sums[i] = 0.0f;
        int before = 0;
        for (int s = 0; s < steps; s++, ring.next()) {
            ring.wait_full();
            const u64 x_here = descriptor(ring.here() + group * 64 * ROW_BYTES), w_here = descriptor(ring.here() + x_bytes);
            asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
            for (int k = 0; k < COLUMNS / 16; k++) multiply(sums, x_here + k * 2, w_here + k * 2);
            asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 1;" ::: "memory");
            if (s > 0) release(before);
            before = ring.stage;
        }
        if (SCALE && other_rows) output.find_scale(width);  // while the tensor cores multiply by the last columns
        asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
        for (int i = 0; i < TILE / 2; i++) asm volatile("" : "+f"(sums[i])::"memory");
        if (steps > 0) release(before);
        if constexpr (SPLIT > 1) exchange<GROUPS, OWN_GROUPS>(sums, place, data, arrived);
        if (CLUSTER_N == 1 || n_tile < n_tiles) output.store(sums, partial, n_tile, n_tiles, place.part, before_sums);
    }
}
