// Values of absorbed latent attention, for few tokens: each head's weighted sum of latents times its rows of the value half of `kv_b_proj`.
//
// A block computes ROWS columns of a head. Weights do not depend on the preceding kernel, attention, which leaves the memory idle for short
// contexts, so a block prefetches all its weights into shared memory while that kernel still runs. The warps of a block split the latent columns:
// each copies and multiplies COLUMNS of them, and their sums are added in shared memory.
//
// As in `fragments.cu`, an instruction multiplies the 16 columns that its lanes have: weights and tokens use the same order.
//
// Constants from the host besides those of `few_rows_output.cu`, of which WARPS is the width of the latent in COLUMNS: WIDTH (columns of a head's
// value).

constexpr int COLUMNS = 64, RANK = COLUMNS * WARPS, ROW_BYTES = 2 * COLUMNS, TILE_BYTES = 16 * ROW_BYTES, WARP_BYTES = TALL * TILE_BYTES;
constexpr int PARTS = WIDTH / ROWS;  // blocks of a head
static_assert(WIDTH % ROWS == 0 && TOKENS * STRIDE * 4 <= WARP_BYTES, "a warp's sums take the place of its weights");

// Computes out [M, heads, WIDTH] from x [M, heads, RANK] and value [heads, WIDTH, RANK] with head stride `value_head`. Blocks: heads * PARTS.
// Offsets fit 32 bits.
extern "C" __global__ void __launch_bounds__(THREADS, 32 / WARPS) project_values(const u16* x, const u16* value, u16* out, int M, int value_head) {
    extern __shared__ __align__(128) u8 shared[];  // [WARPS][ROWS][ROW_BYTES] weights; then the sums of each warp
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int head = blockIdx.x / PARTS, part = blockIdx.x % PARTS, heads = gridDim.x / PARTS;
    u8* const own = shared + warp * WARP_BYTES;

    if (EARLY) launch_next();
    // A lane copies 16 bytes of every fourth row. Odd rows have their halves swapped to avoid bank conflicts.
    const u32 to = shared_address(own) + lane / 8 * ROW_BYTES + (lane % 8 ^ (lane / 8 & 1) * 4) * 16;
    const u16* const from = value + (head * value_head + (part * ROWS + lane / 8) * RANK + warp * COLUMNS + lane % 8 * 8);
    #pragma unroll
    for (int first = 0; first < ROWS; first += 4) copy16<256>(to + first * ROW_BYTES, from + first * RANK);
    commit_copies();
    int row = (g * heads + head) * RANK + warp * COLUMNS + 8 * t;
    asm volatile("" : "+r"(row));  // computed before the wait: the compiler would move it after
    if (EARLY) wait_for_previous();

    uint4 pieces[2][TILES];
    #pragma unroll
    for (int n = 0; n < TILES; n++)
        #pragma unroll
        for (int c = 0; c < 2; c++) {
            pieces[c][n] = make_uint4(0, 0, 0, 0);
            if (8 * n + g < M) pieces[c][n] = *(const uint4*)(x + (row + 8 * n * heads * RANK) + 32 * c);
        }
    wait_copies();
    __syncwarp();
    float sums[TALL][TILES][4] = {};
    #pragma unroll
    for (int i = 0; i < TALL; i++)
        #pragma unroll
        for (int c = 0; c < 2; c++) {
            const u8* const at = own + i * TILE_BYTES + g * ROW_BYTES + (t ^ ((g & 1) ^ c) * 4) * 16;
            const uint4 a = *(const uint4*)at, b = *(const uint4*)(at + 8 * ROW_BYTES);
            #pragma unroll
            for (int n = 0; n < TILES; n++) {
                const uint4 v = pieces[c][n];
                mma(sums[i][n], a.x, b.x, a.y, b.y, v.x, v.y);
                mma(sums[i][n], a.z, b.z, a.w, b.w, v.z, v.w);
            }
        }
    __syncwarp();  // all lanes have read their weights
    Output::leave((float*)own, sums);
    const Norms none = {};
    const int first = blockIdx.x * ROWS, columns = gridDim.x * ROWS;
    Output output;
    output.load(none, out, M, columns, first);
    output.store((const float*)shared, WARP_BYTES / 4, RANK, none, out, nullptr, M, columns, first);
}
