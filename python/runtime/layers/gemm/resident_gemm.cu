// A GEMM of few rows by bfloat16 weights that prefetches most weight rows into shared memory before x is ready:
// out = epilogue(x @ w.T).
//
// Weights do not depend on the preceding kernel. If that kernel waits more than it reads, as attention over short contexts does, the weights are
// copied in this time, and only the multiplication remains when x arrives. The registers stay free for the next kernel.
//
// The warps of a block split the columns of 16 weight rows. Each warp copies its stages, 64 columns of the 16 rows, into its own ring of DEPTH.
// As in `fragments.cu`, an instruction multiplies the 16 columns that its lanes have: weights and rows of x use the same order. With GATED, the
// 16 rows are eight of the gate and the eight rows to multiply by.
//
// Constants from the host besides those of `few_rows_output.cu`, of which TALL is 1: DEPTH, BLOCKS (per SM).

constexpr int STAGE_COLUMNS = 64, STAGE_BYTES = ROWS * STAGE_COLUMNS * 2;
constexpr int LOADED = 4;  // stages whose tokens are loaded together
static_assert(TOKENS * STRIDE * 4 <= DEPTH * STAGE_BYTES, "a warp's sums take the place of its stages");

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) resident_gemm(const u16* x, const u16* w, const u16* bias, void* out, Norms norms, int M, int N, int K) {
    extern __shared__ __align__(128) u8 shared[];  // [WARPS][DEPTH] stages; then the sums of each warp
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int columns = GATED ? N / 2 : N, first = blockIdx.x * OUTPUTS;  // of `out`
    const int stages = K / STAGE_COLUMNS, share = (stages + WARPS - 1) / WARPS, begin = min(stages, warp * share), end = min(stages, begin + share);
    u8* const own = shared + warp * DEPTH * STAGE_BYTES;
    // A lane copies 16 bytes of each of four rows. Rows are 128 bytes apart; odd rows have their halves swapped to avoid bank conflicts.
    const u32 copied = shared_address(own) + lane / 8 * 128 + (lane % 8 ^ (lane / 8 & 1) * 4) * 16;
    const u16* const from = w + (long)(first + lane / 8) * K + lane % 8 * 8;
    const auto copy_stage = [&](int stage, int place) {
        #pragma unroll
        for (int j = 0; j < 4; j++) {
            const int row = GATED ? j % 2 * 4 + j / 2 * columns : j * 4;
            copy16<256>(copied + place * STAGE_BYTES + j * 512, from + (long)row * K + stage * STAGE_COLUMNS);
        }
    };
    if (EARLY) launch_next();
    #pragma unroll 1
    for (int place = 0; place < min(DEPTH, end - begin); place++) copy_stage(begin + place, place);
    commit_copies();
    if (EARLY) wait_for_previous();

    float sums[TALL][TILES][4] = {};
    const u16* tokens[TILES];
    #pragma unroll
    for (int n = 0; n < TILES; n++) tokens[n] = 8 * n + g < M ? x + (long)(8 * n + g) * K + 8 * t : nullptr;
    Output output;
    output.load(norms, out, M, columns, first);
    const u8* const low = own + g * 128 + (t ^ (g & 1) * 4) * 16;
    const int other_half = (g & 1) ? -64 : 64;  // from a row's first 32 columns to its second
    for (int base = begin; base < end; base += DEPTH) {
        const int here = min(DEPTH, end - base);
        #pragma unroll 1
        for (int at = 0; at < here; at += LOADED) {
            uint4 pieces[LOADED][2][TILES];
            #pragma unroll
            for (int j = 0; j < LOADED; j++)
                #pragma unroll
                for (int c = 0; c < 2; c++)
                    #pragma unroll
                    for (int n = 0; n < TILES; n++)
                        pieces[j][c][n] = piece_of(at + j < here ? tokens[n] : nullptr, (base + at + j) * STAGE_COLUMNS + 32 * c);
            if (at == 0) {
                wait_copies();
                __syncwarp();
            }
            #pragma unroll
            for (int j = 0; j < LOADED; j++) {
                if (at + j >= here) break;  // the whole warp
                #pragma unroll
                for (int c = 0; c < 2; c++) {
                    const u8* const from_here = low + (at + j) * STAGE_BYTES + c * other_half;
                    const uint4 a = *(const uint4*)from_here, b = *(const uint4*)(from_here + 1024);
                    #pragma unroll
                    for (int n = 0; n < TILES; n++) {
                        const uint4 v = pieces[j][c][n];
                        mma(sums[0][n], a.x, b.x, a.y, b.y, v.x, v.y);
                        mma(sums[0][n], a.z, b.z, a.w, b.w, v.z, v.w);
                    }
                }
            }
        }
        __syncwarp();  // all lanes have read the stages that are overwritten next
        #pragma unroll 1
        for (int place = 0; place < min(DEPTH, end - base - DEPTH); place++) copy_stage(base + DEPTH + place, place);
    }
    wait_copies();
    __syncwarp();
    Output::leave((float*)own, sums);
    output.store((const float*)shared, DEPTH * STAGE_BYTES / 4, K, norms, out, bias, M, columns, first);
}
