// A GEMM of a few rows by bfloat16 weights whose blocks hold most of their weight rows in shared memory before x is ready:
// out = epilogue(x @ w.T).
//
// Weights do not depend on the kernel before. Where that one waits more than it reads, as attention over short contexts does, the copies of
// weights fill this time, and what is left when x arrives is to multiply. The registers stay free for the kernel that follows.
//
// The warps of a block share the columns of 16 weight rows. Each copies its stages, 64 columns of the 16 rows, into DEPTH places of its own.
// As in `fragments.cu`, an instruction multiplies whichever 16 columns its lanes hold: weights and rows of x agree on the order.
//
// Constants from the host besides those of `fragments.cu`: TOKENS (8 or 16: most rows of x), WARPS, DEPTH, BLOCKS (on a multiprocessor), BIAS,
// SCALE, DEFER, WRITE (0: bfloat16, 1: float32, 2: add to float32).

constexpr int ROWS = 16, STAGE_COLUMNS = 64, STAGE_BYTES = ROWS * STAGE_COLUMNS * 2;
constexpr int STRIDE = ROWS + 4;  // sums of a token in shared memory: the lanes of a warp store to different banks
constexpr int THREADS = 32 * WARPS, TILES = TOKENS / 8;
constexpr int COUNT = TOKENS * ROWS, EACH = (COUNT + THREADS - 1) / THREADS;  // outputs of a block, and of a thread
constexpr int OWN = (TOKENS + WARPS - 1) / WARPS;                             // tokens whose squares a warp sums
constexpr int SQUARES = SCALE ? 4 : 0;                                        // that a lane loads before it multiplies
constexpr int LOADED = 4;                                                     // stages whose tokens are loaded together
static_assert(TOKENS * STRIDE * 4 <= DEPTH * STAGE_BYTES, "a warp's sums take the place of its stages");

__device__ __forceinline__ void copy16(u32 shared, const u16* global) {
    asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16;" :: "r"(shared), "l"(global) : "memory");
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) resident_gemm(const u16* x, const u16* w, const u16* bias, void* out, Norms norms, int M, int N, int K) {
    extern __shared__ __align__(128) u8 shared[];  // [WARPS][DEPTH] stages; then the sums of each warp
    __shared__ float factor[TOKENS];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int first_row = blockIdx.x * ROWS;
    const int stages = K / STAGE_COLUMNS, share = (stages + WARPS - 1) / WARPS, begin = min(stages, warp * share), end = min(stages, begin + share);
    u8* const own = shared + warp * DEPTH * STAGE_BYTES;
    // A lane copies 16 bytes of each of four rows. Rows lie 128 bytes apart; odd ones have their halves swapped, so that reads meet all banks.
    const u32 copied = (u32)__cvta_generic_to_shared(own) + lane / 8 * 128 + (lane % 8 ^ (lane / 8 & 1) * 4) * 16;
    const u16* const from = w + (long)(first_row + lane / 8) * K + lane % 8 * 8;
    const auto copy_stage = [&](int stage, int place) {
        #pragma unroll
        for (int j = 0; j < 4; j++) copy16(copied + place * STAGE_BYTES + j * 512, from + (long)j * 4 * K + stage * STAGE_COLUMNS);
    };
    if (EARLY) asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    #pragma unroll 1
    for (int place = 0; place < min(DEPTH, end - begin); place++) copy_stage(begin + place, place);
    asm volatile("cp.async.commit_group;" ::: "memory");
    if (EARLY) asm volatile("griddepcontrol.wait;" ::: "memory");

    float squares[OWN][SQUARES + 1], before[EACH], sums[TILES][4] = {};
    const u16* tokens[TILES];
    #pragma unroll
    for (int n = 0; n < TILES; n++) tokens[n] = 8 * n + g < M ? x + (long)(8 * n + g) * K + 8 * t : nullptr;
    #pragma unroll
    for (int j = 0; j < OWN; j++)
        #pragma unroll
        for (int q = 0; q < SQUARES; q++) {
            const int token = warp + j * WARPS, part = q * 32 + lane;
            squares[j][q] = token < M && part < norms.parts ? norms.squares[(long)token * norms.parts + part] : 0.0f;
        }
    #pragma unroll
    for (int k = 0; k < EACH; k++) {
        const int i = k * THREADS + threadIdx.x, token = i / ROWS;
        before[k] = WRITE == 2 && token < M ? ((const float*)out)[(long)token * N + first_row + i % ROWS] : 0.0f;
    }
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
                asm volatile("cp.async.wait_all;" ::: "memory");
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
                        mma(sums[n], a.x, b.x, a.y, b.y, v.x, v.y);
                        mma(sums[n], a.z, b.z, a.w, b.w, v.z, v.w);
                    }
                }
            }
        }
        __syncwarp();  // all lanes have read their places
        #pragma unroll 1
        for (int place = 0; place < min(DEPTH, end - base - DEPTH); place++) copy_stage(base + DEPTH + place, place);
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncwarp();
    #pragma unroll
    for (int n = 0; n < TILES; n++) {
        float* const at = (float*)own + (8 * n + 2 * t) * STRIDE + g;
        at[0] = sums[n][0], at[STRIDE] = sums[n][1];
        at[8] = sums[n][2], at[STRIDE + 8] = sums[n][3];
    }
    #pragma unroll
    for (int j = 0; j < OWN; j++) {
        const int token = warp + j * WARPS;
        if (!SCALE || token >= M) break;  // the whole warp
        float sum = 0.0f;
        #pragma unroll
        for (int q = 0; q < SQUARES; q++) sum += squares[j][q];
        #pragma unroll 1
        for (int part = 32 * SQUARES + lane; part < norms.parts; part += 32) sum += norms.squares[(long)token * norms.parts + part];
        #pragma unroll
        for (int apart = 16; apart > 0; apart /= 2) sum += __shfl_xor_sync(~0u, sum, apart);
        if (lane == 0) factor[token] = 1.0f / sqrtf(sum / K + norms.eps);
    }
    __syncthreads();
    #pragma unroll
    for (int k = 0; k < EACH; k++) {
        const int i = k * THREADS + threadIdx.x, token = i / ROWS, o = i % ROWS, column = first_row + o;
        if (i >= COUNT) break;  // the whole warp
        float sum = 0.0f;
        #pragma unroll
        for (int other = 0; other < WARPS; other++) sum += ((const float*)(shared + other * DEPTH * STAGE_BYTES))[token * STRIDE + o];
        const bool in = token < M;
        if (SCALE && in) sum *= factor[token];
        if (BIAS) sum += of_bf16(bias[column]);
        sum += before[k];
        const long place = (long)token * N + column;
        if (in && WRITE == 0) ((u16*)out)[place] = to_bf16(sum);
        if (in && WRITE != 0) ((float*)out)[place] = sum;
        if (DEFER) {
            float square = sum * sum;
            if (in) norms.scaled[place] = to_bf16(sum * of_bf16(norms.gain[column]));
            #pragma unroll
            for (int apart = ROWS / 2; apart > 0; apart /= 2) square += __shfl_xor_sync(~0u, square, apart);
            if (in && o == 0) norms.next_squares[(long)token * gridDim.x + blockIdx.x] = square;
        }
    }
}
