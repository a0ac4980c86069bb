// A GEMM of few rows by e4m3 or int4 weights, which `fragments.cu` reads: out = epilogue(x @ w.T), for any number of weight rows.
//
// The warps of a block split the columns of 16 * TALL weight rows. Weights do not depend on the preceding kernel, so the first BATCH loads of
// each row are issued while that kernel still runs; a small matrix is in registers when x is ready. x is scaled to float16 by a power of
// two, one for the columns of a row that a warp loads at once.
//
// With EXACT, int4 weights have groups of 128 columns, as many as a warp loads at once. Then codes minus zero points are multiplied in bfloat16,
// which represents them and x exactly, and scales are applied to the sums of a group.
//
// Constants from the host besides those of `few_rows_output.cu`: BATCH, EXACT.

constexpr int BLOCKS = TILES * TALL * BATCH > 4 ? 1 : WARPS < 8 ? 3 : 16 / WARPS;  // per SM at least, limited by registers
constexpr int PIECES = LANE_COLUMNS / 8;

struct Fragment {
    uint4 low, high;  // of rows g and g + 8
    u32 low_scale, high_scale;
};

__device__ __forceinline__ Fragment load_fragment(const Weights& w, Row low, Row high, int column, bool in) {
    Fragment f = {make_uint4(0, 0, 0, 0), make_uint4(0, 0, 0, 0), 0, 0};
    if (in) {
        f.low = stream16(low.at + row_bytes(column));
        f.high = stream16(high.at + row_bytes(column));
        const int block = scale_block(w, column);
        f.low_scale = ((const u32*)low.scale)[block];
        f.high_scale = ((const u32*)high.scale)[block];
    }
    return f;
}

// `sums += two weight rows x a token`, for 32 columns of codes in every lane. Zero points are as in `widen_codes`.
__device__ __forceinline__ void multiply_codes(float (&sums)[4], uint4 g_row, uint4 h_row, u32 g_zero, u32 h_zero, const uint4* tokens) {
    const u32 gs[4] = {g_row.x, g_row.y, g_row.z, g_row.w}, hs[4] = {h_row.x, h_row.y, h_row.z, h_row.w};
    const u32* const xs = (const u32*)tokens;
    #pragma unroll
    for (int j = 0; j < 4; j++)
        #pragma unroll
        for (int upper = 0; upper < 2; upper++) {
            const u32 g = gs[j] >> 4 * upper, h = hs[j] >> 4 * upper;
            mma_bf16(sums, widen_codes(g, g_zero), widen_codes(h, h_zero), widen_codes(g >> 8, g_zero), widen_codes(h >> 8, h_zero),
                     xs[8 * upper + 2 * j], xs[8 * upper + 2 * j + 1]);
        }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) fragment_gemm(const u16* x, Weights w, void* out, Norms norms, int M) {
    __shared__ float sums_of_warps[WARPS][TOKENS * STRIDE];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int first = blockIdx.x * OUTPUTS, columns = GATED ? w.rows / 2 : w.rows;
    const int chunks = (w.columns + CHUNK - 1) / CHUNK, share = (chunks + WARPS - 1) / WARPS;
    const int begin = warp * share, end = min(chunks, begin + share);
    Row low[TALL], high[TALL];
    #pragma unroll
    for (int i = 0; i < TALL; i++) {
        const int row = first + i * (GATED ? 8 : 16) + g;
        low[i] = row_of(w, 0, row);
        high[i] = row_of(w, 0, row + (GATED ? columns : 8));
    }
    Fragment weights[BATCH][TALL];
    #pragma unroll
    for (int j = 0; j < BATCH; j++) {
        const int column = (begin + j) * CHUNK + t * LANE_COLUMNS;
        #pragma unroll
        for (int i = 0; i < TALL; i++) weights[j][i] = load_fragment(w, low[i], high[i], column, begin + j < end && column < w.columns);
    }
    if (EARLY) launch_next(), wait_for_previous();

    float sums[TALL][TILES][4] = {};
    const u16* tokens[TILES];
    #pragma unroll
    for (int n = 0; n < TILES; n++) tokens[n] = 8 * n + g < M ? x + (long)(8 * n + g) * w.columns : nullptr;
    Output output;
    output.load(norms, out, M, columns, first);
    for (int chunk = begin; chunk < end; chunk += BATCH) {
        uint4 pieces[BATCH][TILES][PIECES];
        #pragma unroll
        for (int j = 0; j < BATCH; j++) {
            const int column = (chunk + j) * CHUNK + t * LANE_COLUMNS;
            const bool in = chunk + j < end && column < w.columns;
            #pragma unroll
            for (int n = 0; n < TILES; n++)
                #pragma unroll
                for (int k = 0; k < PIECES; k++) pieces[j][n][k] = in ? piece_of(tokens[n], column + 8 * k) : make_uint4(0, 0, 0, 0);
        }
        float widenings[TILES][2];  // of the tokens that a lane has sums of
        #pragma unroll
        for (int n = 0; n < TILES; n++) {
            if (EXACT) {
                #pragma unroll
                for (int j = 0; j < BATCH; j++)
                    #pragma unroll
                    for (int k = 0; k < PIECES; k++) pieces[j][n][k] = reordered(pieces[j][n][k]);
                continue;
            }
            u32 largest = 0;  // of these columns of token g, which four lanes hold
            #pragma unroll
            for (int j = 0; j < BATCH; j++)
                #pragma unroll
                for (int k = 0; k < PIECES; k++) largest = largest8(largest, pieces[j][n][k]);
            largest = max(largest & 0xFFFF, largest >> 16);
            largest = max(largest, __shfl_xor_sync(~0u, largest, 1));
            largest = max(largest, __shfl_xor_sync(~0u, largest, 2));
            const int base = base_of(largest);
            #pragma unroll
            for (int j = 0; j < BATCH; j++)
                #pragma unroll
                for (int k = 0; k < PIECES; k++) pieces[j][n][k] = narrow8(reordered(pieces[j][n][k]), base);
            #pragma unroll
            for (int odd = 0; odd < 2; odd++) widenings[n][odd] = widening(__shfl_sync(~0u, base, 4 * (2 * t + odd)));
        }
        float of_batch[TALL][TILES][4] = {};
        #pragma unroll
        for (int j = 0; j < BATCH; j++) {
            const int next = chunk + BATCH + j, column = next * CHUNK + t * LANE_COLUMNS;
            #pragma unroll
            for (int i = 0; i < TALL; i++) {
                const Fragment f = weights[j][i];
                if (EXACT) {
                    u32 low_zero, high_zero;
                    const float low_scale = group_scale(f.low_scale, low_zero), high_scale = group_scale(f.high_scale, high_zero);
                    #pragma unroll
                    for (int n = 0; n < TILES; n++) {
                        float part[4] = {};
                        multiply_codes(part, f.low, f.high, low_zero, high_zero, pieces[j][n]);
                        add_scaled(sums[i][n], part, low_scale, high_scale);
                    }
                } else if (FORMAT == 3) {
                    #pragma unroll
                    for (int n = 0; n < TILES; n++) multiply_int4(of_batch[i][n], f.low, f.high, f.low_scale, f.high_scale, pieces[j][n]);
                } else {
                    // Take the scale from lane t = 0, which has it even where the columns of the other lanes are past the row's end.
                    const float low_scale = __uint_as_float(__shfl_sync(~0u, f.low_scale, lane & ~3));
                    const float high_scale = __uint_as_float(__shfl_sync(~0u, f.high_scale, lane & ~3));
                    #pragma unroll
                    for (int n = 0; n < TILES; n++) {
                        float part[4] = {};
                        multiply_e4m3(part, f.low, f.high, pieces[j][n]);
                        add_scaled(of_batch[i][n], part, low_scale, high_scale);
                    }
                }
                weights[j][i] = load_fragment(w, low[i], high[i], column, next < end && column < w.columns);
            }
        }
        if (EXACT) continue;
        #pragma unroll
        for (int i = 0; i < TALL; i++)
            #pragma unroll
            for (int n = 0; n < TILES; n++)
                #pragma unroll
                for (int k = 0; k < 4; k++) sums[i][n][k] += of_batch[i][n][k] * widenings[n][k & 1];
    }
    Output::leave(sums_of_warps[warp], sums);
    output.store(sums_of_warps[0], TOKENS * STRIDE, w.columns, norms, out, w.bias, M, columns, first);
}
