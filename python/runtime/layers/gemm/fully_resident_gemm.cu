// A GEMM of few rows by e4m3 weights, all of which are copied into shared memory before x is ready: out = epilogue(x @ w.T).
//
// Weights do not depend on the preceding kernel. All blocks run at the same time, one per SM, so that all weights are copied while that kernel still
// runs, as far as it leaves space, and only the multiplication remains when x arrives.
//
// A unit is 16 weight rows. Blocks have up to TALL units each, as equally as possible. The warps of a block split the columns, SHARE stages each.
// Each copies its columns of x in float16, scaled by a power of two for the largest of them in a row.
//
// Constants from the host besides those of `few_rows_output.cu` and `stages.cu`: SHARE.

constexpr int PIECES = SHARE * STAGE_COLUMNS / 8;             // of 16 bytes of a token, of a warp
constexpr int TOKEN_BYTES = 16 * PIECES + TOKEN_PADDING;
constexpr int AHEAD = (PIECES + 31) / 32;                     // pieces that a lane loads together
static_assert(TOKENS * STRIDE * 4 <= TALL * SHARE * STAGE_BYTES, "a warp's sums take the place of its stages");

extern "C" __global__ void __launch_bounds__(THREADS, 1) fully_resident_gemm(const u16* x, Weights w, void* out, Norms norms, int M, int warp_bytes) {
    extern __shared__ __align__(128) u8 shared[];  // of each warp its stages, then its columns of x; then its sums
    __shared__ __align__(8) float factors[WARPS][TOKENS];  // they undo the scaling to float16
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int units = w.rows / 16, first_unit = (long)units * blockIdx.x / gridDim.x;
    const int own_units = (long)units * (blockIdx.x + 1) / gridDim.x - first_unit, first_row = 16 * first_unit;
    const int stages = (w.columns + STAGE_COLUMNS - 1) / STAGE_COLUMNS, begin = min(stages, warp * SHARE), end = min(stages, begin + SHARE);
    u8* const own = shared + warp * warp_bytes;
    const Targets copied = targets_in(shared_address(own));
    if (EARLY) launch_next();
    #pragma unroll 1
    for (int unit = 0; unit < own_units; unit++) {
        const Sources from = sources_of(w, 0, first_row + 16 * unit, 8);
        #pragma unroll 1
        for (int stage = begin; stage < end; stage++) copy_weights(w, from, 8, copied, (unit * SHARE + stage - begin) * STAGE_BYTES, stage);
    }
    commit_copies();
    if (lane < TOKENS) factors[warp][lane] = 0.0f;
    if (EARLY) wait_for_previous();

    u8* const tokens = own + TALL * SHARE * STAGE_BYTES;
    #pragma unroll 1
    for (int token = 0; token < M; token++) {
        const u16* const row = x + (long)token * w.columns + begin * STAGE_COLUMNS;
        uint4 pieces[AHEAD];
        u32 most = 0;
        #pragma unroll
        for (int j = 0; j < AHEAD; j++) {
            const int piece = 32 * j + lane;
            const bool in = piece < PIECES && begin * STAGE_COLUMNS + 8 * piece < min(w.columns, end * STAGE_COLUMNS);
            pieces[j] = in ? *(const uint4*)(row + 8 * piece) : make_uint4(0, 0, 0, 0);
            most = largest8(most, pieces[j]);
        }
        const int base = base_of(largest_of_warp(max(most & 0xFFFF, most >> 16)));
        #pragma unroll
        for (int j = 0; j < AHEAD; j++)
            if (32 * j + lane < PIECES)
                put_piece(tokens + token * TOKEN_BYTES, 32 * j + lane, narrow8(pieces[j], base));
        if (lane == 0) factors[warp][token] = widening(base);
    }
    Output output;
    output.load(norms, out, M, w.rows, first_row, 16 * own_units);

    const Fragments fragments = fragments_in(own);
    // Lanes share a token if there are few. With TILES 2 there is space for all.
    const u8* const token = tokens + (TILES == 1 ? min(g, M - 1) : g) * TOKEN_BYTES + t * 32;
    float sums[TALL][TILES][4] = {};
    wait_copies();
    __syncwarp();
    #pragma unroll
    for (int unit = 0; unit < TALL; unit++) {
        if (unit >= own_units) break;  // the whole block
        #pragma unroll 2
        for (int stage = 0; stage < end - begin; stage++)
            multiply_stage<TILES>(sums[unit], fragments, (unit * SHARE + stage) * STAGE_BYTES, token + stage * (2 * STAGE_COLUMNS), TOKEN_BYTES);
        #pragma unroll
        for (int n = 0; n < TILES; n++) {
            const float2 factor = *(const float2*)&factors[warp][8 * n + 2 * t];
            sums[unit][n][0] *= factor.x, sums[unit][n][1] *= factor.y, sums[unit][n][2] *= factor.x, sums[unit][n][3] *= factor.y;
        }
    }
    __syncwarp();  // all lanes have read the stages
    Output::leave((float*)own, sums);
    output.store((const float*)shared, warp_bytes / 4, w.columns, norms, out, w.bias, M, w.rows, first_row, 16 * own_units);
}
