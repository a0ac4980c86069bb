// The epilogue of the WGMMA GEMM: what a thread does with its sums before it stores them.
//
// In each group of 8 columns, a thread holds two neighbouring columns of rows `row` and `row` + 8; four lanes share a row.

// WRITE: store in 16 bits; silu(gate) * up; add to float32; store float32; gelu(gate) * up
constexpr int NARROW = 0, SILU = 1, ADD = 2, FLOAT = 3, GELU = 4;
constexpr bool GATED = WRITE == SILU || WRITE == GELU;
constexpr int HALVES = GATED ? 2 : 1;
constexpr int OUTPUTS = TILE / HALVES;
constexpr int GROUPS = OUTPUTS / 8;
constexpr int OWN_GROUPS = GROUPS / SHARERS;  // groups that a block stores
constexpr int BATCH = ROWS > 128 ? 4 : 8;  // groups that are stored together, after the loads of all of them
constexpr int NO_COLUMN = 0x7FFFFFFF;
// With ADD, whether a thread has registers for what it adds and multiplies its results by while it multiplies: besides TILE / 2 sums, four old
// values and two gains of each group.
constexpr bool PRELOADS = WRITE == ADD && TILE / 2 + 5 * OWN_GROUPS <= (ROWS == 64 ? 160 : ROWS == 128 ? 120 : 0);

// x * sigmoid(x), or for gelu in its tanh form x * sigmoid(sqrt(8 / pi) * (x + 0.044715 x ** 3)).
__device__ __forceinline__ float activate(float x) {
    const float slope = WRITE == GELU ? 1.5957691216057308f * (x + 0.044715f * x * x * x) : x;
    return times_sigmoid(x, slope);
}

// Transpose 4 x 4 words over four lanes: words[i] of lane t becomes words[t] of lane i.
__device__ __forceinline__ void transpose(u32 (&words)[4]) {
#pragma unroll
    for (int step = 1; step < 4; step *= 2) {
        const bool odd = threadIdx.x & step;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (i & step) continue;
            const u32 other = __shfl_xor_sync(0xFFFFFFFF, odd ? words[i] : words[i + step], step);
            if (odd) words[i] = other;
            else words[i + step] = other;
        }
    }
}

// The largest entry so far and its column, ordered as in kernels/argmax_reduce.py: the first of equal entries wins, and NaN is above all numbers.
struct Largest {
    float value = 0.0f;
    int column = NO_COLUMN;

    __device__ __forceinline__ void see(float x, int at) {
        if (x > value || (x != x && value == value) || column == NO_COLUMN) value = x, column = at;
    }
    __device__ __forceinline__ int key() const {
        if (column == NO_COLUMN) return -0x7FFFFFFF - 1;
        if (value != value) return 0x7FFFFFFF;
        if (value == 0.0f) return 0;
        const int bits = __float_as_int(value);
        return bits < 0 ? bits ^ 0x7FFFFFFF : bits;
    }
};

// Deferred norms (deferred_norm.py): inputs of the norm before this GEMM, and outputs for the norm after it.
struct Norms {
    const float* squares;
    int parts;
    float eps;
    const u16* gain;
    u16* scaled;
    float* next_squares;
    int next_columns, next_parts;  // all columns of the output here
};

// What a thread loads before its sums are complete if it PRELOADS: the old values of `out`, by group and half, and the gains of the next norm.
struct Before {
    float2 old[PRELOADS ? 2 * OWN_GROUPS : 1];
    u32 gains[PRELOADS && DEFER ? OWN_GROUPS : 1];
};

// Where a thread's results go. `column` is the thread's first column; the block stores rows from `least_row` and columns from `least_column` on.
struct Output {
    void* out;
    const u16* bias;
    Norms norms;
    int rows, columns, row, column = 0, least_row = 0, least_column = 0;
    float scale[2] = {1.0f, 1.0f}, squares[2] = {0.0f, 0.0f};
    Largest top[2];

    __device__ __forceinline__ bool has_row(int half) const { return row + half * 8 >= least_row && row + half * 8 < rows; }
    __device__ __forceinline__ bool has_column(int group) const { return column + group * 8 >= least_column && column + group * 8 < columns; }
    __device__ __forceinline__ bool inside(int half, int group) const { return has_row(half) && has_column(group); }
    __device__ __forceinline__ long at(int half, int group) const { return (long)(row + half * 8) * columns + column + group * 8; }

    __device__ __forceinline__ float2 old_of(int half, int group) const {
        return inside(half, group) ? *(const float2*)((const float*)out + at(half, group)) : make_float2(0.0f, 0.0f);
    }
    __device__ __forceinline__ u32 gains_of(int group) const {
        return column + group * 8 < columns ? *(const u32*)(norms.gain + column + group * 8) : 0;
    }
    __device__ __forceinline__ Before before() const {
        Before loaded;
        if constexpr (PRELOADS) {
#pragma unroll
            for (int i = 0; i < 2 * OWN_GROUPS; i++) loaded.old[i] = old_of(i % 2, i / 2);
#pragma unroll
            for (int group = 0; DEFER && group < OWN_GROUPS; group++) loaded.gains[group] = gains_of(group);
        }
        return loaded;
    }

    // Compute `scale` of both rows from the sums of squares: 1 / root mean square.
    __device__ __forceinline__ void find_scale(int width) {
        const int lane = threadIdx.x % 4;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float sum = 0.0f;
            if (row + half * 8 < rows) {
                const float* at = norms.squares + (long)(row + half * 8) * norms.parts;
                if (norms.parts % 4 == 0) {
#pragma unroll 8
                    for (int i = lane * 4; i < norms.parts; i += 16) {
                        const float4 four = *(const float4*)(at + i);
                        sum += (four.x + four.y) + (four.z + four.w);
                    }
                } else {
                    for (int i = lane; i < norms.parts; i += 4) sum += at[i];
                }
            }
            scale[half] = rsqrtf(sum_of_four(sum) / width + norms.eps);
        }
    }
    // Scale the sums of a batch, add the bias, and multiply by the gates.
    __device__ __forceinline__ void finish(float* sums, int first) const {
#pragma unroll
        for (int i = first; i < first + BATCH; i++) {
            if (i >= OWN_GROUPS) continue;
#pragma unroll
            for (int half = 0; half < HALVES; half++) {
                float* v = sums + (half * OWN_GROUPS + i) * 4;
                if constexpr (SCALE) v[0] *= scale[0], v[1] *= scale[0], v[2] *= scale[1], v[3] *= scale[1];
                if (!BIAS || column + i * 8 >= columns) continue;
                const u16* from = bias + half * columns + column + i * 8;
                const float a = widen(from[0]), b = widen(from[1]);
                v[0] += a, v[1] += b, v[2] += a, v[3] += b;
            }
            if constexpr (GATED) {
#pragma unroll
                for (int j = i * 4; j < i * 4 + 4; j++) sums[j] = activate(sums[j]) * sums[GROUPS * 4 + j];
            }
        }
    }
    // Store `pairs` of up to four groups from `first` on. For four groups, the four lanes of a row transpose them, and each lane stores one group.
    __device__ __forceinline__ void store_pairs(u16* to, u32 (&pairs)[2][4], int first) const {
        const int lane = threadIdx.x % 4;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            if (first + 4 <= OWN_GROUPS) {
                transpose(pairs[half]);
                // Column 0 of group `lane`, from column 2 * lane of group 0.
                if (inside(half, first + lane)) {
                    const u32* words = pairs[half];
                    *(uint4*)(to + at(half, first + lane) - 2 * lane) = make_uint4(words[0], words[1], words[2], words[3]);
                }
            } else {
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    if (first + i < OWN_GROUPS && inside(half, first + i)) *(u32*)(to + at(half, first + i)) = pairs[half][i];
                }
            }
        }
    }
    // Store a batch in 16 bits; with DEFER it is multiplied by the gain.
    __device__ __forceinline__ void store_narrow(u16* to, const float* sums, int batch, const Before& before) const {
#pragma unroll
        for (int first = batch; first < batch + BATCH && first < OWN_GROUPS; first += 4) {
            u32 pairs[2][4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                if (first + i >= OWN_GROUPS) continue;
                const float* v = sums + (first + i) * 4;
                float a = 1.0f, b = 1.0f;
                if constexpr (DEFER) {
                    const u32 two = PRELOADS ? before.gains[first + i] : gains_of(first + i);
                    a = widen(two & 0xFFFF), b = widen(two >> 16);
                }
                pairs[0][i] = narrow(v[0] * a, v[1] * b), pairs[1][i] = narrow(v[2] * a, v[3] * b);
            }
            store_pairs(to, pairs, first);
        }
    }
    // Store a batch in float32. With ADD, the old values of `out` are added first, and `sums` are updated to the new ones.
    __device__ __forceinline__ void store_floats(float* sums, int first, const Before& before) {
        float2 old[BATCH * 2];
#pragma unroll
        for (int i = 0; i < BATCH * 2; i++) {
            const int group = first + i / 2;
            if (WRITE == ADD && group < OWN_GROUPS) old[i] = PRELOADS ? before.old[2 * first + i] : old_of(i % 2, group);
        }
#pragma unroll
        for (int i = 0; i < BATCH * 2; i++) {
            const int group = first + i / 2, half = i % 2;
            if (group >= OWN_GROUPS || !inside(half, group)) continue;
            float* v = sums + group * 4 + half * 2;
            if constexpr (WRITE == ADD) v[0] += old[i].x, v[1] += old[i].y;
            *(float2*)((float*)out + at(half, group)) = make_float2(v[0], v[1]);
            if constexpr (DEFER) squares[half] += v[0] * v[0] + v[1] * v[1];
        }
    }
    // Store the sums of squares of this thread's rows as column `part` of `parts`.
    __device__ __forceinline__ void store_squares(int part, int parts) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const float sum = sum_of_four(squares[half]);
            if (threadIdx.x % 4 == 0 && has_row(half)) norms.next_squares[(long)(row + half * 8) * parts + part] = sum;
            squares[half] = 0.0f;
        }
    }
    __device__ __forceinline__ void find_largest(const float* sums, int first) {
#pragma unroll
        for (int i = first * 2; i < (first + BATCH) * 2; i++) {
            const int from = column + i / 2 * 8;
            if (i / 2 < OWN_GROUPS && from < columns) top[i % 2].see(sums[i * 2], from), top[i % 2].see(sums[i * 2 + 1], from + 1);
        }
    }
    // Store the key and the column of the largest of this thread's rows as column `tile` of `tiles`.
    __device__ __forceinline__ void store_argmax(int* partial, int tile, int tiles) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int key = top[half].key(), at = top[half].column;
#pragma unroll
            for (int step = 1; step < 4; step *= 2) {
                const int other_key = __shfl_xor_sync(0xFFFFFFFF, key, step), other_at = __shfl_xor_sync(0xFFFFFFFF, at, step);
                if (other_key > key || (other_key == key && other_at < at)) key = other_key, at = other_at;
            }
            const int to = row + half * 8;
            if (threadIdx.x % 4 == 0 && has_row(half)) {
                partial[(long)to * tiles + tile] = key;
                partial[(long)(rows + to) * tiles + tile] = at;
            }
            top[half] = Largest();
        }
    }
    // The whole epilogue of column tile `tile` of `tiles`; this block stores part `part` of the tile.
    __device__ __forceinline__ void store(float* sums, int* partial, int tile, int tiles, int part, const Before& before) {
#pragma unroll
        for (int first = 0; first < OWN_GROUPS; first += BATCH) {
            finish(sums, first);
            if constexpr (WRITE == ADD || (WRITE == FLOAT && STORE)) store_floats(sums, first, before);
            if constexpr (WRITE == NARROW || GATED) store_narrow((u16*)out, sums, first, before);
            if constexpr (DEFER) store_narrow(norms.scaled, sums, first, before);
            if constexpr (ARGMAX) find_largest(sums, first);
            asm volatile("" ::: "memory");  // otherwise the compiler hoists the loads of all batches, and spills registers
        }
        if constexpr (DEFER) store_squares(tile * SHARERS + part, tiles * SHARERS);
        if constexpr (ARGMAX) store_argmax(partial, tile, tiles);
    }
};
