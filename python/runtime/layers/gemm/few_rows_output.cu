// The epilogue of a GEMM of few rows. The warps of a block split the columns of 16 * TALL weight rows (split-K), and their sums are added in shared
// memory.
//
// Constants from the host besides those of `fragments.cu`: TOKENS (8 or 16: most rows of x), WARPS, TALL (1 or 2), BIAS, GATED (weight rows are
// those of the gate, then as many to multiply by), SCALE, DEFER, WRITE (0: bfloat16, 1: float32, 2: add to float32).

constexpr int ROWS = 16 * TALL;                   // weight rows of a block
constexpr int OUTPUTS = GATED ? ROWS / 2 : ROWS;  // columns of `out` of a block
constexpr int STRIDE = ROWS + 4;                  // sums of a token in shared memory: the lanes of a warp store to different banks
constexpr int THREADS = 32 * WARPS, TILES = TOKENS / 8;
constexpr int COUNT = TOKENS * OUTPUTS, EACH = (COUNT + THREADS - 1) / THREADS;  // outputs of a block, and of a thread
constexpr int OWN = (TOKENS + WARPS - 1) / WARPS;                                // tokens whose squares a warp sums
constexpr int SQUARES = SCALE ? 4 : 0;                                           // that a lane loads before it multiplies

// The epilogue state of a thread. `M`: tokens; `columns`: of `out`, of which the block computes `own` from `first` on.
struct Output {
    float squares[OWN][SQUARES + 1], before[EACH], gains[EACH];

    // Loads what does not depend on the sums.
    __device__ __forceinline__ void load(const Norms& norms, const void* out, int M, int columns, int first, int own = OUTPUTS) {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        #pragma unroll
        for (int j = 0; j < OWN; j++)
            #pragma unroll
            for (int q = 0; q < SQUARES; q++) {
                const int token = warp + j * WARPS, part = q * 32 + lane;
                squares[j][q] = token < M && part < norms.parts ? norms.squares[(long)token * norms.parts + part] : 0.0f;
            }
        #pragma unroll
        for (int k = 0; k < EACH; k++) {
            const int i = k * THREADS + threadIdx.x, token = i / OUTPUTS, column = first + i % OUTPUTS;
            const bool in = token < M && i % OUTPUTS < own;
            before[k] = WRITE == 2 && in ? ((const float*)out)[(long)token * columns + column] : 0.0f;
            gains[k] = DEFER && in && first < norms.next_columns ? of_bf16(norms.gain[column]) : 0.0f;
        }
    }

    // Writes the fragments of a warp to its own [TOKENS][STRIDE] floats in shared memory.
    static __device__ __forceinline__ void leave(float* own, const float (&sums)[TALL][TILES][4]) {
        const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
        #pragma unroll
        for (int i = 0; i < TALL; i++)
            #pragma unroll
            for (int n = 0; n < TILES; n++) {
                float* const at = own + (8 * n + 2 * t) * STRIDE + 16 * i + g;
                at[0] = sums[i][n][0], at[STRIDE] = sums[i][n][1];
                at[8] = sums[i][n][2], at[STRIDE + 8] = sums[i][n][3];
            }
    }

    // Adds up the sums that the warps have written with `leave`, `apart` floats from warp to warp, and stores the results. `width`: columns of x.
    __device__ __forceinline__ void store(
        const float* sums, int apart, int width, const Norms& norms, void* out, const u16* bias, int M, int columns, int first, int own = OUTPUTS
    ) const {
        __shared__ float factor[TOKENS];
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        #pragma unroll
        for (int j = 0; j < OWN; j++) {
            const int token = warp + j * WARPS;
            if (!SCALE || token >= M) break;  // the whole warp
            float sum = 0.0f;
            #pragma unroll
            for (int q = 0; q < SQUARES; q++) sum += squares[j][q];
            #pragma unroll 1
            for (int part = 32 * SQUARES + lane; part < norms.parts; part += 32) sum += norms.squares[(long)token * norms.parts + part];
            sum = sum_of_lanes<32>(sum);
            if (lane == 0) factor[token] = 1.0f / sqrtf(sum / width + norms.eps);
        }
        __syncthreads();
        #pragma unroll
        for (int k = 0; k < EACH; k++) {
            const int i = k * THREADS + threadIdx.x, token = i / OUTPUTS, o = i % OUTPUTS, column = first + o;
            if (i >= COUNT) break;  // the whole warp
            const int at = token * STRIDE + (GATED ? o / 8 * 16 + o % 8 : o);
            float sum = 0.0f, up = 0.0f;
            #pragma unroll
            for (int other = 0; other < WARPS; other++) {
                sum += sums[other * apart + at];
                if (GATED) up += sums[other * apart + at + 8];
            }
            const bool in = token < M && o < own;
            if (SCALE && in) sum *= factor[token], up *= factor[token];
            if (BIAS && o < own) sum += of_bf16(bias[column]), up += GATED ? of_bf16(bias[columns + column]) : 0.0f;
            if (GATED) sum = activate(sum, up, 0.0f, 0.0f);
            sum += before[k];
            const long place = (long)token * columns + column;
            if (in && WRITE == 0) ((u16*)out)[place] = to_bf16(sum);
            if (in && WRITE != 0) ((float*)out)[place] = sum;
            if (DEFER && first < norms.next_columns) {  // all columns of a block are normed, or none
                float square = sum * sum;
                if (in) norms.scaled[(long)token * norms.next_columns + column] = to_bf16(sum * gains[k]);
                square = sum_of_lanes<OUTPUTS>(square);
                if (in && o == 0) norms.next_squares[(long)token * norms.next_parts + blockIdx.x] = square;
            }
        }
    }
};
