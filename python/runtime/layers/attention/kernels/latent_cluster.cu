// MLA attention of few queries: the blocks of a cluster split the keys of one request, and merge their results.
//
// All heads read the same rows: 512 columns, which are also the values, and 64 more. A cluster computes ROWS rows (queries times heads) of a
// request, the narrow operand of each instruction; keys, and then columns of the values, are the wide one. A block takes neighbouring
// keys, in steps of four tiles of 16. In a step two warps multiply each tile, half of the columns each; each warp then computes the softmax weights
// of the step for one row in eight, and multiplies all weights by its own 64 columns of the values. The blocks exchange the columns that each
// merges through distributed shared memory.
//
// All but the last `width` keys of a request were stored before this pass. Their copies begin while the previous kernel still runs; if registers
// suffice, the operands of the first step are loaded before that kernel ends. A row is one TMA copy, which cannot reorder it: rows are padded
// by 16 bytes, so that those of eight neighbouring keys, or of every fourth one, are in different banks.
//
// Source: flash-decoding (Dao et al. 2023); PTX ISA, "cp.async.bulk", "redux.sync". Constants from the host: TILES (1 to 3: eight rows each, that a
// cluster computes), MOST_BLOCKS (of a cluster, a power of two), EARLY (whether the kernel starts before the previous one has ended).

constexpr int WARPS = 8, THREADS = 32 * WARPS, ROWS = 8 * TILES;
constexpr int RANK = 512, COLUMNS = RANK + 64, ROW_BYTES = 2 * COLUMNS, PIECES = ROW_BYTES / 16, PITCH = ROW_BYTES + 16;
constexpr int TILE_KEYS = 16, TILE_BYTES = TILE_KEYS * PITCH, STEP_TILES = WARPS / 2, STEP_KEYS = STEP_TILES * TILE_KEYS;
constexpr int SLOTS = 2 * STEP_TILES;            // tiles in shared memory: two steps
constexpr int HALF = COLUMNS / 2, CHUNKS = HALF / 32;
constexpr int VALUE_TILES = RANK / 16 / WARPS;   // of 16 columns of the values, of a warp
constexpr int VALUE_SHIFT = 6;                   // one more than the binary logarithm of all such tiles
constexpr int SCORE_PITCH = STEP_KEYS + 4;       // two rows are eight banks apart
constexpr int CHAINS = TILES == 1 ? 4 : TILES == 2 ? 2 : 1;  // sums of a score that do not wait for each other
constexpr int PART_BYTES = TILES * 8 * RANK * 4;  // of all parts that a block merges
constexpr int STEPS_AHEAD = 4;                   // whose rows are prefetched into L2, beyond those that are copied
constexpr int COPIED = TILE_KEYS * STEP_TILES / WARPS;  // keys of a step that a warp copies: half of a tile
// Registers per thread that two blocks of the preceding kernel, of 7168 registers each, leave to a block. They suffice for these operands of the
// first step: chunks of the keys, and tiles of the values.
constexpr int MOST_REGISTERS = 200, EARLY_CHUNKS = TILES == 1 ? 8 : TILES == 2 ? 4 : 0, EARLY_TILES = TILES == 1 ? 2 : 0;
constexpr int HELD_TILES = TILES == 1 ? STEP_TILES : 0;  // of the values, that registers hold while a step is weighed
static_assert(RANK == 16 << VALUE_SHIFT - 1 && COLUMNS == 2 * 32 * CHUNKS && PART_BYTES <= STEP_TILES * TILE_BYTES && MOST_BLOCKS <= 16);
constexpr u32 NO_ROW = ~0u;

struct Pass {
    const u16 *q, *cache;  // [B * width, heads, COLUMNS]; rows of COLUMNS by slot
    u16* out;              // [B * width, heads, RANK]
    const int *pages, *rows, *lens;
    float scale;  // of scores, times the base-2 logarithm of e
    int heads, width, row_blocks, page_shift, pages_stride;  // row_blocks: clusters of a request
};

// The maximum over a warp, by an integer reduction: the bits of negative floats are flipped, because as integers they are in reverse order.
__device__ __forceinline__ float max_of_warp(float x) {
    int bits = __float_as_int(x), most;
    bits ^= bits >> 31 & 0x7FFFFFFF;
    asm volatile("redux.sync.max.s32 %0, %1, 0xffffffff;" : "=r"(most) : "r"(bits));
    return __int_as_float(most ^ (most >> 31 & 0x7FFFFFFF));
}

// Writes the columns of this block, of which `used` blocks have sent their parts, in the order of the blocks.
__device__ __forceinline__ void merge(u16* out, const float2* peaks, const float* parts, int rows, int size, int rank, int used) {
    const int shift = VALUE_SHIFT - __ffs(size), tiles = 1 << shift;
    #pragma unroll 1
    for (u32 i = threadIdx.x; i < ROWS * 8 << shift; i += THREADS) {  // columns g and g + 8 of a tile of 16; whole warps
        const int g = i % 8, tile = i / 8 & tiles - 1, row = i / 8 >> shift, head = row % 8;
        const float* const own = parts + (tile * TILES + row / 8) * size * 128 + (head / 2 * 8 + g) * 4 + 2 * ((head ^ tile) & 1);
        float2 peak[MOST_BLOCKS], part[MOST_BLOCKS];
        float top = NO_SCORE, total = 0.0f, x = 0.0f, y = 0.0f;
        #pragma unroll
        for (int c = 0; c < MOST_BLOCKS; c++) {
            const int from = min(c, used - 1);
            peak[c] = peaks[from * ROWS + row], part[c] = *(const float2*)(own + from * 128);
        }
        #pragma unroll
        for (int c = 0; c < MOST_BLOCKS; c++) {
            if (c >= used) peak[c].x = NO_SCORE;  // a weight of zero
            top = fmaxf(top, peak[c].x);
        }
        const float safe = finite_top(top);
        #pragma unroll
        for (int c = 0; c < MOST_BLOCKS; c++) {
            const float weight = exp2_of(peak[c].x - safe);
            total += peak[c].y * weight, x += part[c].x * weight, y += part[c].y * weight;
        }
        const float scale = 1.0f / (total == 0.0f ? 1.0f : total);
        // Even lanes write columns g and g + 1, odd ones g + 7 and g + 8.
        const bool odd = g & 1;
        const float other = __shfl_xor_sync(~0u, odd ? x : y, 1);
        u16* const to = out + row * RANK + 16 * (rank * tiles + tile) + (odd ? g + 7 : g);
        if (row < rows) *(u32*)to = odd ? to_bf16x2(other * scale, y * scale) : to_bf16x2(x * scale, other * scale);
    }
}

// Bit for bit, an output depends on its own request's queries and keys, on the size of the cluster and on the constants only.
extern "C" __global__ void __maxnreg__(MOST_REGISTERS) latent_attention(const Pass pass) {
    extern __shared__ __align__(128) u8 shared[];
    u8* const keys = shared;                                        // [SLOTS] tiles
    float4* const parts = (float4*)(keys + SLOTS * TILE_BYTES - PART_BYTES);  // [tiles][TILES][blocks][32], in the place of the last keys
    float* const scores = (float*)(keys + SLOTS * TILE_BYTES);      // [2][ROWS][SCORE_PITCH], of either half of the columns
    u32* const weights = (u32*)(scores + 2 * ROWS * SCORE_PITCH);   // [STEP_TILES][TILES][32][2], as the tensor cores take them
    float* const shrinks = (float*)(weights + STEP_TILES * TILES * 64);  // [ROWS], factors of what was summed before a step
    float2* const peaks = (float2*)(shrinks + ROWS);                // [MOST_BLOCKS][ROWS], largest score and sum of weights of a block
    __shared__ u64 full[SLOTS], sent;                               // barriers: of the copies of each tile; of peaks and parts
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;

    if (EARLY) launch_next();
    if (threadIdx.x == 0) {
        #pragma unroll
        for (int i = 0; i < SLOTS; i++) barrier_init(shared_address(full + i), TILE_KEYS / COPIED);
        barrier_init(shared_address(&sent), 1);
        publish_barriers();
    }
    __syncwarp();
    cluster_arrive();  // this block has started; every block waits for all of them before it writes to their shared memory
    const int size = cluster_size(), rank = cluster_rank(), tile_shift = VALUE_SHIFT - __ffs(size);  // of the number of tiles that a block merges
    const int item = cluster_id(), b = item / pass.row_blocks, first_row = (item - b * pass.row_blocks) * ROWS;
    const int all_rows = pass.width * pass.heads, rows = min(all_rows - first_row, ROWS);
    const int length = pass.lens[b];
    const int* const pages = pass.pages + (long)pass.rows[b] * pass.pages_stride;

    // The tiles of this block, of as many as `used` blocks share.
    const int tiles = (length + TILE_KEYS - 1) / TILE_KEYS, each = max((tiles + size - 1) / size, 1), used = (tiles + each - 1) / each;
    const int first_key = rank * each * TILE_KEYS, stop = min(length, first_key + each * TILE_KEYS), fresh = length - pass.width;
    const int steps = (max(stop - first_key, 0) + STEP_KEYS - 1) / STEP_KEYS;

    const auto row_of = [&](int key) -> u32 { return pages[key >> pass.page_shift] << pass.page_shift | key & (1 << pass.page_shift) - 1; };
    const auto address_of = [&](u32 row) { return pass.cache + (u64)row * COLUMNS; };
    // Of a step, lanes 0 to 7 of each warp copy a key each; from `stop` on there is none.
    const auto row_in = [&](int step) -> u32 {
        const int key = first_key + step * STEP_KEYS + warp * COPIED + lane;
        return lane < COPIED && key < stop ? row_of(key) : NO_ROW;
    };
    // Starts the copies of the keys of a step that are below `limit`. The others of a tile count as copied.
    const auto start_copies = [&](int step, u32 row, int limit) {
        const int slot = step % 2 * STEP_TILES, first = first_key + step * STEP_KEYS + warp * COPIED;
        const u32 barrier = shared_address(full + slot + warp * COPIED / TILE_KEYS);
        if (lane == 0) barrier_expect(barrier, min(max(limit - first, 0), COPIED) * ROW_BYTES);
        __syncwarp();
        if (row != NO_ROW && first + lane < limit)
            copy_bulk(shared_address(keys) + slot * TILE_BYTES + (warp * COPIED + lane) * PITCH, address_of(row), ROW_BYTES, barrier);
    };
    // Zero the places of keys past `stop`: their weights are zero, but stale shared memory may hold NaN, and 0 * NaN is NaN.
    const auto clear_rest = [&](int step) {
        u8* const to = keys + step % 2 * STEP_TILES * TILE_BYTES;
        const int first = stop - first_key - step * STEP_KEYS;
        #pragma unroll 1
        for (int i = first * (PITCH / 16) + threadIdx.x; i < STEP_KEYS * (PITCH / 16); i += THREADS) *(uint4*)(to + 16 * i) = make_uint4(0, 0, 0, 0);
    };

    u32 next_row = row_in(0);  // of the step whose copies start next
    __syncthreads();  // the barriers are there
    #pragma unroll 1
    for (int step = 0; step < min(steps, 2); step++) {
        const u32 row = next_row;
        next_row = row_in(step + 1);
        start_copies(step, row, min(fresh, stop));
    }
    #pragma unroll 1
    for (int step = 2; step < min(steps, 2 + STEPS_AHEAD); step++)
        if (const u32 row = row_in(step); row != NO_ROW) prefetch_bulk(address_of(row), ROW_BYTES);
    if (threadIdx.x == 0) barrier_expect(shared_address(&sent), used * ROWS * (8 + (64 << tile_shift)));
    if (steps == 1 || steps == 2) clear_rest(steps - 1);
    // Keys of this pass that the first two steps read, one by each warp.
    const int fresh_from = max(fresh, first_key), fresh_to = min(stop, first_key + 2 * STEP_KEYS);
    const u32 fresh_row = fresh_from + warp < fresh_to ? row_of(fresh_from + warp) : NO_ROW;
    const u32 fresh_place = shared_address(keys) + (fresh_from + warp - first_key) * PITCH;

    // Scores: rows g and g + 8 of an operand are neighbouring keys. Lane (g, t) holds 8 neighbouring columns of its rows in each 32: an instruction
    // multiplies the same 16 columns of keys and queries, whichever these are.
    const int tile = warp % STEP_TILES, half = warp / STEP_TILES, pair = 2 * (g & 4 | g / 2 % 2 | g % 2 * 2);
    const u32 key_place = shared_address(keys) + tile * TILE_BYTES + pair * PITCH + half * 2 * HALF + 16 * t;
    // Values: lanes name rows of eight columns to ldmatrix, those of keys 0 to 7 first, 8 neighbouring columns after each other.
    const u32 value_place = shared_address(keys) + (lane / 16 * 8 + lane % 8) * PITCH + (warp * VALUE_TILES * 2 + lane / 8 % 2) * 16;
    uint4 key[CHUNKS][2];
    u32 value[STEP_TILES][VALUE_TILES][4];
    const auto load_keys = [&](int j, int slot) {
        #pragma unroll
        for (int h = 0; h < 2; h++) key[j][h] = load_shared(key_place + slot * TILE_BYTES + h * PITCH + 64 * j);
    };
    const auto load_values = [&](int i, int slot) {
        #pragma unroll
        for (int m = 0; m < VALUE_TILES; m++) load_transposed<2>(value[i][m], value_place + (slot + i) * TILE_BYTES + 32 * m);
    };
    int limit[TILES];  // the last key that the row of this warp sees, of each eight
    const u16* queries[TILES];
    #pragma unroll
    for (int n = 0; n < TILES; n++) {
        limit[n] = min(fresh + (first_row + 8 * n + warp) / pass.heads, stop - 1);
        const bool in = steps > 0 && 8 * n + g < rows;
        queries[n] = in ? pass.q + (long)(b * all_rows + first_row + 8 * n + g) * COLUMNS + half * HALF + 8 * t : nullptr;
    }
    __syncthreads();
    if (EARLY_CHUNKS > 0 && steps > 0) {
        barrier_wait(shared_address(full + tile), 0);
        #pragma unroll
        for (int j = 0; j < EARLY_CHUNKS; j++) load_keys(j, 0);
        #pragma unroll
        for (int i = 0; i < EARLY_TILES; i++) barrier_wait(shared_address(full + i), 0), load_values(i, 0);
    }
    if (EARLY) wait_for_previous();

    uint4 q[TILES][CHUNKS];
    #pragma unroll
    for (int n = 0; n < TILES; n++)
        #pragma unroll
        for (int j = 0; j < CHUNKS; j++) q[n][j] = queries[n] != nullptr ? *(const uint4*)(queries[n] + 32 * j) : make_uint4(0, 0, 0, 0);
    if (fresh_from < fresh_to) {
        if (fresh_row != NO_ROW) {
            #pragma unroll 1
            for (int i = lane; i < PIECES; i += 32) copy16<128>(fresh_place + 16 * i, address_of(fresh_row) + 8 * i);
        }
        wait_copies();
        __syncthreads();
        if (first_key + (tile + 1) * TILE_KEYS > fresh) {
            #pragma unroll
            for (int j = 0; j < EARLY_CHUNKS; j++) load_keys(j, 0);
        }
        #pragma unroll
        for (int i = 0; i < EARLY_TILES; i++)
            if (first_key + (i + 1) * TILE_KEYS > fresh) load_values(i, 0);
    }
    cluster_wait();

    float top[TILES], total[TILES], out[TILES][VALUE_TILES][4] = {};  // of the block's keys; totals of this lane's
    #pragma unroll
    for (int n = 0; n < TILES; n++) top[n] = NO_SCORE, total[n] = 0.0f;
    #pragma unroll 1
    for (int step = 0; step < steps; step++) {
        const int slot = step % 2 * STEP_TILES;
        float sums[CHAINS][TILES][4] = {};
        if (EARLY_CHUNKS == 0 || step > 0) {
            barrier_wait(shared_address(full + slot + tile), step / 2 & 1);
            #pragma unroll
            for (int j = 0; j < EARLY_CHUNKS; j++) load_keys(j, slot);
        }
        #pragma unroll
        for (int j = 0; j < CHUNKS; j++) {
            if (j >= EARLY_CHUNKS) load_keys(j, slot);
            const uint4 a = key[j][0], c = key[j][1];
            #pragma unroll
            for (int n = 0; n < TILES; n++) {
                mma_bf16(sums[2 * j % CHAINS][n], a.x, c.x, a.y, c.y, q[n][j].x, q[n][j].y);
                mma_bf16(sums[(2 * j + 1) % CHAINS][n], a.z, c.z, a.w, c.w, q[n][j].z, q[n][j].w);
            }
        }
        #pragma unroll
        for (int n = 0; n < TILES; n++) {
            float (&sum)[4] = sums[0][n];
            #pragma unroll
            for (int i = 0; i < 4; i++) {
                if constexpr (CHAINS == 4) sum[i] = sum[i] + sums[1][n][i] + (sums[2][n][i] + sums[3][n][i]);
                else if constexpr (CHAINS == 2) sum[i] += sums[1][n][i];
            }
            float* const to = scores + (half * ROWS + 8 * n + 2 * t) * SCORE_PITCH + tile * TILE_KEYS + pair;
            *(float2*)to = make_float2(sum[0], sum[2]);
            *(float2*)(to + SCORE_PITCH) = make_float2(sum[1], sum[3]);
        }
        __syncthreads();  // all scores of this step are written, all values of the previous step are read

        if (step > 0 && step + 1 < steps) {
            start_copies(step + 1, next_row, stop);
            next_row = row_in(step + 2);  // one step early, so that no copy waits for the page-table load
            if (step + 2 == steps) clear_rest(step + 1);
        }
        // Each warp weighs row `warp` of each eight, each lane two neighbouring keys.
        int lane = threadIdx.x % 32;
        asm volatile("" : "+r"(lane));  // places that depend on it are computed in each step: registers are few
        #pragma unroll
        for (int n = 0; n < TILES; n++) {
            const float* const from = scores + (8 * n + warp) * SCORE_PITCH + 2 * lane;
            const float2 low = *(const float2*)from, high = *(const float2*)(from + ROWS * SCORE_PITCH);
            #pragma unroll
            for (int i = 0; n == 0 && i < HELD_TILES; i++)
                if (i >= EARLY_TILES || step > 0) load_values(i, slot);  // the copies of each tile were waited for by two warps
            const int at = first_key + step * STEP_KEYS + 2 * lane;
            const float x = at <= limit[n] ? (low.x + high.x) * pass.scale : NO_SCORE;
            const float y = at < limit[n] ? (low.y + high.y) * pass.scale : NO_SCORE;
            const float higher = fmaxf(top[n], max_of_warp(fmaxf(x, y))), safe = finite_top(higher);
            const float shrink = exp2_of(top[n] - safe), weight_x = exp2_of(x - safe), weight_y = exp2_of(y - safe);
            total[n] = total[n] * shrink + (weight_x + weight_y);
            top[n] = higher;
            // Of the operand, row `warp` and the keys 2 t and 2 t + 1 of either half of a tile.
            weights[((lane / 8 * TILES + n) * 32 + 4 * warp + t) * 2 + lane / 4 % 2] = to_bf16x2(weight_x, weight_y);
            if (lane == 0) shrinks[8 * n + warp] = shrink;
        }
        __syncthreads();

        if (step > 0) {
            #pragma unroll
            for (int n = 0; n < TILES; n++) {
                const float2 shrink = *(const float2*)(shrinks + 8 * n + 2 * t);
                #pragma unroll
                for (int m = 0; m < VALUE_TILES; m++)
                    out[n][m][0] *= shrink.x, out[n][m][1] *= shrink.y, out[n][m][2] *= shrink.x, out[n][m][3] *= shrink.y;
            }
        }
        #pragma unroll
        for (int i = 0; i < STEP_TILES; i++) {
            if (i >= HELD_TILES) load_values(i, slot);
            #pragma unroll
            for (int n = 0; n < TILES; n++) {
                const uint2 w = ((const uint2*)weights)[(i * TILES + n) * 32 + lane];
                #pragma unroll
                for (int m = 0; m < VALUE_TILES; m++) mma_bf16(out[n][m], value[i][m][0], value[i][m][1], value[i][m][2], value[i][m][3], w.x, w.y);
            }
        }
    }

    // Block r merges the tiles of 16 columns from r << tile_shift on. Parts overwrite the second half of the slots. If any block has used these
    // slots, all blocks must finish reading their keys and values before one sends.
    if (each > STEP_TILES) {
        cluster_arrive();
        cluster_wait();
    }
    if (steps > 0) {
        #pragma unroll
        for (int m = 0; m < VALUE_TILES; m++) {
            const int own = warp * VALUE_TILES + m, to_rank = own >> tile_shift;
            const float4* const to = parts + ((own & (1 << tile_shift) - 1) * TILES * size + rank) * 32 + t * 8 + g;
            #pragma unroll
            for (int n = 0; n < TILES; n++) {  // the rows of odd tiles in reverse order: reads of two tiles are in different banks
                const float (&v)[4] = out[n][m];
                const float4 sum = m % 2 ? make_float4(v[1], v[3], v[0], v[2]) : make_float4(v[0], v[2], v[1], v[3]);
                send(to_rank, shared_address(to + n * size * 32), shared_address(&sent), sum);
            }
        }
        #pragma unroll
        for (int n = 0; n < TILES; n++) {
            const float sum = sum_of_lanes<32>(total[n]);
            const u32 to = shared_address(peaks + rank * ROWS + 8 * n + warp);
            if (lane < size) send(address_in(to, lane), address_in(shared_address(&sent), lane), top[n], sum);
        }
    }
    // Each block waits here for the parts of all blocks, so none exits while another still writes to its shared memory.
    if (used == 0) return;
    barrier_wait_first(shared_address(&sent));
    merge(pass.out + (long)(b * all_rows + first_row) * RANK, peaks, (const float*)parts, rows, size, rank, used);
}
