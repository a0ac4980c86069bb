// Attention of few queries over long caches: the blocks of a cluster split the keys of one request and KV head, and merge their results.
//
// A block takes neighbouring keys, in steps of WARPS tiles of 16. In a step each warp multiplies all queries by the keys of its own tile and
// leaves the weights, relative to its own largest score, in shared memory. After the block's one barrier of a step, each warp multiplies all
// weights by its own columns of the values. Sums of the warps therefore need no merge; those of the blocks do: each block sends every other one
// the columns which that one merges, through distributed shared memory.
//
// All but the last `width` keys of a request were stored before this pass. Their copies begin while the previous kernel still runs. The last
// ones were stored by that kernel, or they are rotated and stored here.
//
// Source: flash-decoding (Dao et al. 2023). Constants from the host: see `cluster_parts.cu`.

// Writes rows of `columns` columns from `first_column` on, of which `used` blocks have sent their parts, in the order of the blocks.
__device__ __forceinline__ void merge(
    const Pass& pass, const float* sinks, const float2* peaks, const float* parts, int b, int head, int first_row, int rows, int columns,
    int first_column, int used
) {
    const int shift = __ffs(columns) - 1;
    #pragma unroll 1
    for (int i = threadIdx.x; i < rows << shift >> 1; i += THREADS) {  // neighbouring columns
        const int row = i >> shift - 1, column = 2 * i & columns - 1;
        float top = sinks[row], total = top == NO_SCORE ? 0.0f : 1.0f, x = 0.0f, y = 0.0f;
        #pragma unroll 1
        for (int first = 0; first < used; first += MERGED_AT_ONCE) {
            float2 peak[MERGED_AT_ONCE], part[MERGED_AT_ONCE];
            float higher = top;
            #pragma unroll
            for (int c = 0; c < MERGED_AT_ONCE; c++) {
                const bool in = first + c < used;
                peak[c] = in ? peaks[(first + c) * ROWS + row] : make_float2(NO_SCORE, 0.0f);
                part[c] = in ? *(const float2*)(parts + ((first + c) * ROWS + row) * columns + column) : make_float2(0.0f, 0.0f);
            }
            #pragma unroll
            for (int c = 0; c < MERGED_AT_ONCE; c++) higher = fmaxf(higher, peak[c].x);
            const float safe = finite_top(higher), shrink = exp2_of(top - safe);
            total *= shrink, x *= shrink, y *= shrink;
            #pragma unroll
            for (int c = 0; c < MERGED_AT_ONCE; c++) {
                const float weight = exp2_of(peak[c].x - safe);
                total += peak[c].y * weight, x += part[c].x * weight, y += part[c].y * weight;
            }
            top = higher;
        }
        const float scale = 1.0f / (total == 0.0f ? 1.0f : total);
        *(u32*)(pass.out + place_of(pass, b, head, first_row + row) + first_column + column) = to_bf16x2(x * scale, y * scale);
    }
}

// Bit for bit, an output depends on its own request's queries and keys, on the size of the cluster and on the constants only.
extern "C" __global__ void __launch_bounds__(THREADS, 1) cluster_attention(const Pass pass) {
    extern __shared__ __align__(128) u8 shared[];
    u8* const keys = shared;                                             // [STAGES][WARPS] tiles
    u8* const values = keys + STAGES * STAGE_BYTES;                      // likewise
    uint4* const weights = (uint4*)(values + STAGES * STAGE_BYTES);      // [2][WARPS][ROW_TILES][32], as the tensor cores take them
    u8* const new_queries = (u8*)weights + STEP_WEIGHTS;                 // [ROWS], which step 1 overwrites
    float* const tops = (float*)(new_queries + max(STEP_WEIGHTS, ROWS * ROW_BYTES));  // [2][ROWS][WARPS], largest scores of the warps so far
    float* const totals = tops + 2 * ROWS * WARPS;                       // [ROWS][WARPS], sums of weights
    float* const sinks = totals + ROWS * WARPS;                          // [ROWS], base 2
    float2* const peaks = (float2*)(sinks + ROWS);                       // [MOST_BLOCKS][ROWS], largest score and sum of weights of a block
    float* const parts = (float*)(peaks + MOST_BLOCKS * ROWS);           // [blocks][ROWS][columns], weighted sums of values of a block
    __shared__ u64 sent;                                                 // the barrier at which peaks and parts are counted
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;

    if (EARLY) launch_next();
    if (threadIdx.x == 0) barrier_init(shared_address(&sent), 1), publish_barriers();
    __syncwarp();
    cluster_arrive();  // this block has started; every block waits for all of them before it writes to their shared memory
    // As many blocks as the largest power of two in the cluster merge, each `columns` columns; the others only send.
    const int size = cluster_size(), rank = cluster_rank(), merge_shift = 31 - __clz(size), columns = D >> merge_shift;
    const bool merges = rank < 1 << merge_shift;
    const int item = cluster_id(), pair = item / pass.row_blocks, b = pair / pass.kv_heads, head = pair - b * pass.kv_heads;
    const int first_row = (item - pair * pass.row_blocks) * ROWS, rows = min(pass.width * pass.group - first_row, ROWS);
    const int length = pass.lens[b];
    const int* const pages = pass.pages + (long)pass.rows[b] * pass.pages_stride;
    NewHead heads[ROUNDS];
    if constexpr (ROTATES) {
        #pragma unroll
        for (int round = 0; round < ROUNDS; round++) heads[round] = new_head(pass, b, head, first_row, rows, round);
    }

    // The tiles of this block, of as many as `used` blocks share.
    const int low_tile = pass.window < 0 ? 0 : max(length - pass.width - pass.window, 0) / TILE_KEYS;
    const int end_tile = (length + TILE_KEYS - 1) / TILE_KEYS, count = max(end_tile - low_tile, 0), each = max((count + size - 1) / size, 1);
    const int used = (count + each - 1) / each, begin = low_tile + rank * each, end = min(begin + each, end_tile);
    const int steps = (max(end - begin, 0) + WARPS - 1) / WARPS, stop = min(length, end * TILE_KEYS), fresh = length - pass.width;

    // The row in the caches of key `lane % 16` of this warp's tile in a step.
    const auto row_in = [&](int step) -> u32 {
        const int key = (begin + step * WARPS + warp) * TILE_KEYS + lane % TILE_KEYS;
        if (key >= stop) return 0;
        const u32 page = pages[key >> pass.page_shift];
        return (page << pass.page_shift | key & (1 << pass.page_shift) - 1) * pass.kv_heads + head;
    };
    const u32 own_keys = shared_address(keys) + warp * TILE_BYTES, own_values = shared_address(values) + warp * TILE_BYTES;
    u32 row = row_in(0);
    #pragma unroll 1
    for (int s = 0; s < STAGES; s++) {
        const int tile = begin + s * WARPS + warp;
        const u32 next = row_in(s + 1);
        if (tile < end) copy_tile<STORED, false>(own_keys + s * STAGE_BYTES, pass.k, row, tile * TILE_KEYS, fresh, stop);
        commit_copies();
        if (s < steps) copy_tile<STORED, true>(own_values + s * STAGE_BYTES, pass.v, row, tile * TILE_KEYS, fresh, stop);
        commit_copies();
        row = next;
    }
    u32 last_row = 0, next_row = row;  // of the values and of the keys that are copied next
    #pragma unroll 1
    for (int s = STAGES; s < STAGES + STEPS_AHEAD; s++) {
        const u8* const line = (const u8*)(lane < TILE_KEYS ? pass.k : pass.v) + (u64)row * ROW_BYTES;
        if ((begin + s * WARPS + warp) * TILE_KEYS + lane % TILE_KEYS < stop) {
            #pragma unroll
            for (int i = 0; i < LINES; i++) prefetch(line + 128 * i);
        }
        row = row_in(s + 1);
    }

    // The rows of this lane are g and g + 8 of each 16.
    int position[ROW_TILES][2];
    const u16* queries[ROW_TILES][2];
    #pragma unroll
    for (int m = 0; m < ROW_TILES; m++)
        #pragma unroll
        for (int h = 0; h < 2; h++) {
            const int own = 16 * m + 8 * h + g;
            position[m][h] = fresh + query_of(pass, first_row + own);
            queries[m][h] = own < rows ? pass.q + place_of(pass, b, head, first_row + own) + 8 * t : nullptr;
        }
    if (threadIdx.x < ROWS) {
        const int at = head_of(pass, head, first_row + threadIdx.x);
        const auto sink = [&]() { return pass.float_sinks ? ((const float*)pass.sinks)[at] : of_bf16(((const u16*)pass.sinks)[at]); };
        sinks[threadIdx.x] = pass.sinks == nullptr ? NO_SCORE : sink() * 1.4426950408889634f;
    }
    if (merges && threadIdx.x == 0) barrier_expect(shared_address(&sent), used * rows * (8 + 4 * columns));
    if constexpr (ROTATES) {
        const Block block = {head, first_row, begin, fresh, stop};
        #pragma unroll
        for (int round = 0; round < ROUNDS; round++)
            place_head(pass, block, heads[round], shared_address(new_queries), shared_address(keys), shared_address(values));
    }
    if (EARLY) wait_for_previous();

    // Lane (g, t) holds 8 neighbouring columns of its rows in each 32: an instruction multiplies the same 16 columns of queries and keys, whichever
    // these are, so a score sums all columns.
    uint4 q[ROW_TILES][2][D / 32];
    if constexpr (ROTATES) {
        uint4 chunks[ROUNDS][2];
        #pragma unroll
        for (int round = 0; round < ROUNDS; round++) {
            const NewHead& h = heads[round];
            chunks[round][0] = chunks[round][1] = make_uint4(0, 0, 0, 0);
            if (h.from != nullptr) chunks[round][0] = load_global(h.from), chunks[round][1] = load_global(h.from + h.apart);
        }
        #pragma unroll
        for (int round = 0; round < ROUNDS; round++) store_head(pass, heads[round], chunks[round][0], chunks[round][1]);
        __syncthreads();
    }
    #pragma unroll
    for (int m = 0; m < ROW_TILES; m++)
        #pragma unroll
        for (int h = 0; h < 2; h++)
            #pragma unroll
            for (int j = 0; j < D / 32; j++) {
                if constexpr (ROTATES) q[m][h][j] = *(const uint4*)(new_queries + (16 * m + 8 * h + g) * ROW_BYTES + key_chunk(g, 4 * j + t) * 16);
                else q[m][h][j] = steps > 0 && queries[m][h] != nullptr ? *(const uint4*)(queries[m][h] + 32 * j) : make_uint4(0, 0, 0, 0);
            }
    if constexpr (!ROTATES) {
        #pragma unroll 1
        for (int s = 0; s < STAGES; s++) {
            const int tile = begin + s * WARPS + warp;
            if (tile >= end || (tile + 1) * TILE_KEYS <= fresh) continue;
            const u32 of_fresh = row_in(s);
            copy_tile<FRESH, false>(own_keys + s * STAGE_BYTES, pass.k, of_fresh, tile * TILE_KEYS, fresh, stop);
            copy_tile<FRESH, true>(own_values + s * STAGE_BYTES, pass.v, of_fresh, tile * TILE_KEYS, fresh, stop);
            commit_copies();  // one group more than the waits below count; it is complete here, so those waits still cover all copies they need
            wait_copies<0>();
        }
    }

    float top[ROW_TILES][2], total[ROW_TILES][2];  // of this warp's keys; totals of this lane's
    float peak[ROW_TILES][2], whole[ROW_TILES][2], out[ROW_TILES][GROUPS][4] = {};  // of the block's keys
    #pragma unroll
    for (int m = 0; m < ROW_TILES; m++)
        #pragma unroll
        for (int h = 0; h < 2; h++) top[m][h] = peak[m][h] = NO_SCORE, total[m][h] = whole[m][h] = 0.0f;
    int stage = 0, stage_before = STAGES - 1;
    #pragma unroll 1
    for (int step = 0; step < steps; step++) {
        const int tile = begin + step * WARPS + warp;
        float scores[ROW_TILES][CHAINS][2][4] = {};
        wait_copies<2 * STAGES - 1>();
        __syncwarp();
        if (tile < end) {
            const u8* const own = keys + stage * STAGE_BYTES + warp * TILE_BYTES + g * ROW_BYTES;
            #pragma unroll
            for (int j = 0; j < D / 32; j++)
                #pragma unroll
                for (int n = 0; n < 2; n++) {
                    const uint4 k = *(const uint4*)(own + 8 * n * ROW_BYTES + key_chunk(g, 4 * j + t) * 16);
                    #pragma unroll
                    for (int m = 0; m < ROW_TILES; m++) {
                        const uint4 a = q[m][0][j], c = q[m][1][j];
                        mma_bf16(scores[m][0][n], a.x, c.x, a.y, c.y, k.x, k.y);
                        mma_bf16(scores[m][CHAINS - 1][n], a.z, c.z, a.w, c.w, k.z, k.w);
                    }
                }
        }
        const int parity = step & 1;
        const bool last = step == steps - 1;
        #pragma unroll
        for (int m = 0; m < ROW_TILES; m++) {
            u32 packed[2][2];  // by half of the rows and of the keys
            #pragma unroll
            for (int h = 0; h < 2; h++) {
                const int seen_from = pass.window < 0 ? 0 : position[m][h] - pass.window;
                const int seen_to = pass.causal ? min(position[m][h], stop - 1) : stop - 1;
                float x[4], higher = top[m][h];
                #pragma unroll
                for (int i = 0; i < 4; i++) {
                    const int key = tile * TILE_KEYS + i / 2 * 8 + 2 * t + i % 2;
                    float score = scores[m][0][i / 2][2 * h + i % 2];
                    if (CHAINS == 2) score += scores[m][CHAINS - 1][i / 2][2 * h + i % 2];
                    x[i] = key >= seen_from && key <= seen_to ? score * pass.scale : NO_SCORE;
                    higher = fmaxf(higher, x[i]);
                }
                higher = fmaxf(higher, __shfl_xor_sync(~0u, higher, 1));
                higher = fmaxf(higher, __shfl_xor_sync(~0u, higher, 2));
                const float safe = finite_top(higher);
                #pragma unroll
                for (int i = 0; i < 4; i++) x[i] = exp2_of(x[i] - safe);
                total[m][h] = total[m][h] * exp2_of(top[m][h] - safe) + ((x[0] + x[1]) + (x[2] + x[3]));
                top[m][h] = higher;
                packed[h][0] = to_bf16x2(x[0], x[1]);
                packed[h][1] = to_bf16x2(x[2], x[3]);
                const int row = 16 * m + 8 * h + g;
                if (t == 0) tops[(parity * ROWS + row) * WARPS + warp] = higher;
                if (last) {
                    const float sum = sum_of_four(total[m][h]);
                    if (t == 0) totals[row * WARPS + warp] = sum;
                }
            }
            weights[((parity * WARPS + warp) * ROW_TILES + m) * 32 + lane] = make_uint4(packed[0][0], packed[1][0], packed[0][1], packed[1][1]);
        }
        if (step < STAGES) wait_copies<2 * STAGES - 2>();
        else wait_copies<2 * STAGES - 4>();
        __syncthreads();

        // All warps have read the keys of this step and the values of the previous step: their stages may be overwritten.
        if (tile + STAGES * WARPS < end)
            copy_tile<ALL, false>(own_keys + stage * STAGE_BYTES, pass.k, next_row, (tile + STAGES * WARPS) * TILE_KEYS, fresh, stop);
        commit_copies();
        if (step > 0 && step + STAGES - 1 < steps)
            copy_tile<ALL, true>(own_values + stage_before * STAGE_BYTES, pass.v, last_row, (tile + (STAGES - 1) * WARPS) * TILE_KEYS, fresh, stop);
        commit_copies();
        last_row = next_row;
        next_row = row_in(step + STAGES + 1);  // one step early, so that no copy waits for the page-table load

        u32 v[WARPS][2 * GROUPS];
        #pragma unroll
        for (int w = 0; w < WARPS; w++)
            #pragma unroll
            for (int n = 0; n < GROUPS; n += 2) {
                const int key = lane % TILE_KEYS, chunk = warp * GROUPS + n + (GROUPS > 1 ? lane / TILE_KEYS : 0);
                const u32 at = shared_address(values) + stage * STAGE_BYTES + w * TILE_BYTES + key * ROW_BYTES + value_chunk(key, chunk) * 16;
                load_transposed<GROUPS == 1 ? 1 : 2>(*(u32(*)[GROUPS == 1 ? 2 : 4])(v[w] + 2 * n), at);
            }
        #pragma unroll
        for (int m = 0; m < ROW_TILES; m++) {
            float factor[2][WARPS];
            #pragma unroll
            for (int h = 0; h < 2; h++) {
                const float* const from = tops + (parity * ROWS + 16 * m + 8 * h + g) * WARPS;
                float highest = NO_SCORE;
                #pragma unroll
                for (int w = 0; w < WARPS; w += 4) {
                    const float4 four = *(const float4*)(from + w);
                    factor[h][w] = four.x, factor[h][w + 1] = four.y, factor[h][w + 2] = four.z, factor[h][w + 3] = four.w;
                }
                #pragma unroll
                for (int w = 0; w < WARPS; w++) highest = fmaxf(highest, factor[h][w]);
                const float safe = finite_top(highest), shrink = exp2_of(peak[m][h] - safe);
                #pragma unroll
                for (int w = 0; w < WARPS; w++) factor[h][w] = exp2_of(factor[h][w] - safe);
                #pragma unroll
                for (int n = 0; n < GROUPS; n++) out[m][n][2 * h] *= shrink, out[m][n][2 * h + 1] *= shrink;
                peak[m][h] = highest;
                if (last) {
                    const float* const sums = totals + (16 * m + 8 * h + g) * WARPS;
                    #pragma unroll
                    for (int w = 0; w < WARPS; w += 4) {
                        const float4 four = *(const float4*)(sums + w);
                        whole[m][h] += four.x * factor[h][w] + four.y * factor[h][w + 1] + four.z * factor[h][w + 2] + four.w * factor[h][w + 3];
                    }
                }
            }
            #pragma unroll
            for (int w = 0; w < WARPS; w++) {
                const uint4 a = weights[((parity * WARPS + w) * ROW_TILES + m) * 32 + lane];
                #pragma unroll
                for (int n = 0; n < GROUPS; n++) {
                    float sums[4] = {};
                    mma_bf16(sums, a.x, a.y, a.z, a.w, v[w][2 * n], v[w][2 * n + 1]);
                    #pragma unroll
                    for (int i = 0; i < 4; i++) out[m][n][i] += sums[i] * factor[i / 2][w];
                }
            }
        }
        stage_before = stage;
        stage = stage + 1 == STAGES ? 0 : stage + 1;
    }

    // Block r merges columns r * columns to (r + 1) * columns.
    cluster_wait();
    if (steps > 0) {
        #pragma unroll
        for (int n = 0; n < GROUPS; n++) {
            const int column = (warp * GROUPS + n) * 8 + 2 * t, to_rank = column >> __ffs(columns) - 1;
            const u32 to = address_in(shared_address(parts + (rank * ROWS + g) * columns + (column & columns - 1)), to_rank);
            const u32 barrier = address_in(shared_address(&sent), to_rank);
            #pragma unroll
            for (int m = 0; m < ROW_TILES; m++)
                #pragma unroll
                for (int h = 0; h < 2; h++)
                    if (16 * m + 8 * h + g < rows) send(to + (16 * m + 8 * h) * columns * 4, barrier, out[m][n][2 * h], out[m][n][2 * h + 1]);
        }
        #pragma unroll 1
        for (int other = warp; other < 1 << merge_shift; other += WARPS) {
            const u32 to = address_in(shared_address(peaks + rank * ROWS + g), other), barrier = address_in(shared_address(&sent), other);
            #pragma unroll
            for (int m = 0; m < ROW_TILES; m++)
                #pragma unroll
                for (int h = 0; h < 2; h++)
                    if (t == 0 && 16 * m + 8 * h + g < rows) send(to + (16 * m + 8 * h) * 8, barrier, peak[m][h], whole[m][h]);
        }
    }
    // A block that merges waits here for the parts of all blocks, so it does not exit while another still writes to its shared memory.
    if (used == 0 || !merges) return;
    barrier_wait_first(shared_address(&sent));
    merge(pass, sinks, peaks, parts, b, head, first_row, rows, columns, rank * columns, used);
}
