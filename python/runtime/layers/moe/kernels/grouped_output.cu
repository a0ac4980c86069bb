// Results of the grouped GEMMs: gates, weights of pairs and rounding, then stores.
//
// Each warp transposes its results in its own part of shared memory and stores them in pieces of whole sectors: bulk copies would go one by
// one, because each row has an address of its own.
//
// With OVERLAP, a warp keeps its sums in 16 bits and stores a part of them in each of the first steps of the next item. A thread has no
// registers for two sets of sums in 32 bits. Gates and ups are rounded here, and again when they are one; nothing else is rounded twice.
//
// Defined before this text: TILE, STORED, ELEMENT, GATED, ACT, BIAS; grouped_work.cu.

constexpr int SILU = 0, CLAMPED_SWIGLU = 1, GELU_TANH = 2;
constexpr int HALVES = GATED ? 2 : 1, OUTPUTS = TILE / HALVES;
constexpr int PITCH = STORED * 2 + 16;  // bytes from row to row of the columns that are staged together, without bank conflicts
constexpr int SCALE_BLOCK = 128;        // rows and columns of weights with one scale, and columns of a row between the GEMMs
constexpr bool QUANTIZES = ELEMENT == 1 && GATED;
constexpr int PIECES = STORED / 8, AT_ONCE = 32 / PIECES, ROUNDS = 16 / AT_ONCE;  // of 16 bytes, of a row; rows that a warp stores at once
// Columns that are stored in one step of the next item: the unit of special functions takes 400 cycles for those of the first GEMM.
constexpr int PART = GATED && STORED > 32 ? 32 : STORED, PARTS = OUTPUTS / PART;

// Scales of e4m3 weights [E, scale_rows, scale_columns], of rows of x, and those that are stored. Rows of x have one scale in the first
// GEMM; those between the GEMMs have [width / SCALE_BLOCK, places].
struct Scales { const float *weights, *rows; float* out; int scale_rows, scale_columns, places; };
struct Gate { float alpha, limit; };

// Sums of a warp's 16 rows that wait for the next item: in pairs of columns, and where both rows of this thread go.
struct Held {
    u32 words[TILE / 4];
    int targets[2], valid, first, expert;
};

// Four 8 x 8 matrices as they lie in the sums: rows 0-7 and 8-15 of eight columns, then of the next eight. `to`: row `lane % 16`, the first
// eight columns in lanes below 16, the others above.
__device__ __forceinline__ void store_matrices(u32 to, const u32 (&words)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared::cta.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(words[0]), "r"(words[1]),
                 "r"(words[2]), "r"(words[3])
                 : "memory");
}

__device__ __forceinline__ uint4 load_shared(u32 from) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(from) : "memory");
    return v;
}

// Two values as e4m3, the second in the upper byte.
__device__ __forceinline__ u16 quantize(float low, float high) {
    u16 both;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(both) : "f"(high), "f"(low));
    return both;
}

// act(gate) * up of two neighbouring columns. They share a reciprocal, because the unit of special functions limits the end of a tile: that
// of the product of their divisors, which are at most 2^60 so that it is finite. There act(gate) is 1e-18 of the gate.
__device__ __forceinline__ void multiply_gates(float (&gates)[2], const float (&ups)[2], const Gate& act) {
    float divisors[2], factors[2], inverse;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        float& gate = gates[i];
        float slope = gate;
        factors[i] = ups[i];
        if constexpr (ACT == GELU_TANH) slope = 1.5957691216057308f * (gate + 0.044715f * gate * gate * gate);
        if constexpr (ACT == CLAMPED_SWIGLU) {
            gate = fminf(gate, act.limit);
            factors[i] = fminf(fmaxf(ups[i], -act.limit), act.limit) + 1.0f;
            slope = act.alpha * gate;
        }
        divisors[i] = 1.0f + exp2_of(fminf(slope * -1.4426950408889634f, 60.0f));
    }
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(divisors[0] * divisors[1]));
#pragma unroll
    for (int i = 0; i < 2; i++) gates[i] *= divisors[1 - i] * inverse * factors[i];
}

// Where the results of an item go, for one thread.
struct Output {
    u16* out;
    const u16* bias;
    int rows, columns;  // of weights of an expert; of the output
    Gate act;
    u32 staging;        // of the warp: 16 rows
    int lane;

    // Sums of two columns in both rows of the thread, ready to be stored.
    __device__ __forceinline__ void finish(
        float* v, const float* up, int column, int expert, const float (&scale)[2], const float (&weight)[2]
    ) const {
        float two[2][2] = {{v[0], v[1]}, {v[2], v[3]}}, others[2][2] = {};
        if constexpr (GATED) others[0][0] = up[0], others[0][1] = up[1], others[1][0] = up[2], others[1][1] = up[3];
        u32 biases[HALVES] = {};
        if constexpr (BIAS) {
            if (column < columns) {
#pragma unroll
                for (int half = 0; half < HALVES; half++)
                    biases[half] = *(const u32*)(bias + (long)expert * rows + half * columns + column);
            }
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float& sum = two[i / 2][i % 2];
            float& other = others[i / 2][i % 2];
            if constexpr (QUANTIZES) sum *= scale[i / 2], other *= scale[i / 2];
            if constexpr (BIAS) {
                sum += widen(biases[0] >> i % 2 * 16);
                if constexpr (GATED) other += widen(biases[HALVES - 1] >> i % 2 * 16);
            }
            if constexpr (!GATED) sum *= weight[i / 2];
        }
        if constexpr (GATED) multiply_gates(two[0], others[0], act), multiply_gates(two[1], others[1], act);
#pragma unroll
        for (int i = 0; i < 4; i++) v[i] = two[i / 2][i % 2];
    }
    // Store an item's sums as e4m3, in rows from `top` on, of which the first `valid` of the warp are stored.
    __device__ __forceinline__ void store_quantized(
        float* sums, const Item& item, int top, int valid, const Scales& scales, const float (&scale)[2]
    ) const {
        if (item.column * OUTPUTS >= columns) return;  // `columns` is a multiple of SCALE_BLOCK
        float largest[2] = {1e-12f, 1e-12f};
#pragma unroll
        for (int i = 0; i < OUTPUTS / 8; i++) {
            float* v = sums + i * 4;
            finish(v, v + OUTPUTS / 2, item.column * OUTPUTS + i * 8 + lane % 4 * 2, item.expert, scale, {});
#pragma unroll
            for (int j = 0; j < 4; j++) largest[j / 2] = fmaxf(largest[j / 2], fabsf(v[j]));
        }
        float factors[2];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            largest[half] = fmaxf(largest[half], __shfl_xor_sync(~0u, largest[half], 1));
            largest[half] = fmaxf(largest[half], __shfl_xor_sync(~0u, largest[half], 2));
            factors[half] = 448.0f / largest[half];
            const int row = lane / 4 + half * 8;
            if (lane % 4 == 0 && row < valid) scales.out[item.column * scales.places + top + row] = largest[half] / 448.0f;
        }
        __syncwarp();  // what was staged before has been read
#pragma unroll
        for (int i = 0; i < OUTPUTS / 8; i++) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const float* v = sums + i * 4 + half * 2;
                const u32 to = staging + (lane / 4 + half * 8) * PITCH + i * 8 + lane % 4 * 2;
                const u16 both = quantize(v[0] * factors[half], v[1] * factors[half]);
                asm volatile("st.shared.u16 [%0], %1;" ::"r"(to), "h"(both) : "memory");
            }
        }
        __syncwarp();
#pragma unroll
        for (int row = lane / PIECES; row < 16; row += AT_ONCE) {
            const uint4 words = load_shared(staging + row * PITCH + lane % PIECES * 16);
            if (row < valid) *(uint4*)((char*)out + (long)(top + row) * columns + item.column * OUTPUTS + lane % PIECES * 16) = words;
        }
    }
    // Rows of the output to which this lane stores; -1 from the `valid` rows of the warp on.
    __device__ __forceinline__ void find_rows(int (&rows_to)[ROUNDS], const int (&targets)[2], int valid) const {
#pragma unroll
        for (int i = 0; i < ROUNDS; i++) {
            const int row = i * AT_ONCE + lane / PIECES;
            const int low = __shfl_sync(~0u, targets[0], row % 8 * 4), high = __shfl_sync(~0u, targets[1], row % 8 * 4);
            rows_to[i] = row >= valid ? -1 : row < 8 ? low : high;
        }
    }
    // Store what the warp has staged, from column `first` on.
    __device__ __forceinline__ void store_staged(const int (&rows_to)[ROUNDS], int first) const {
        __syncwarp();
        const int column = first + lane % PIECES * 8;
#pragma unroll
        for (int i = 0; i < ROUNDS; i++) {
            const uint4 words = load_shared(staging + (i * AT_ONCE + lane / PIECES) * PITCH + lane % PIECES * 16);
            if (rows_to[i] >= 0 && column < columns) *(uint4*)(out + (long)rows_to[i] * columns + column) = words;
        }
    }
    // Store an item's sums; both rows of this thread go to rows `targets` of the output, and the first `valid` rows of the warp are stored.
    __device__ __forceinline__ void store(
        float* sums, const Item& item, const int (&targets)[2], int valid, const float (&scale)[2], const float (&weight)[2]
    ) const {
        const u32 to = staging + lane % 16 * PITCH + lane / 16 * 16;
        int rows_to[ROUNDS];
        find_rows(rows_to, targets, valid);
#pragma unroll
        for (int pass = 0; pass < OUTPUTS / STORED; pass++) {
            const int first = item.column * OUTPUTS + pass * STORED;
            __syncwarp();  // what was staged before has been read
#pragma unroll
            for (int i = 0; i < STORED / 8; i += 2) {
                u32 words[4];
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    float* v = sums + (pass * STORED / 8 + i + j) * 4;
                    finish(v, v + (GATED ? OUTPUTS / 2 : 0), first + (i + j) * 8 + lane % 4 * 2, item.expert, scale, weight);
                    words[2 * j] = narrow(v[0], v[1]), words[2 * j + 1] = narrow(v[2], v[3]);
                }
                store_matrices(to + i * 16, words);
            }
            store_staged(rows_to, first);
        }
    }
    // Keep an item's sums for `store_part`, with the arguments of `store`.
    __device__ __forceinline__ void keep(
        Held& held, float* sums, const Item& item, const int (&targets)[2], int valid, const float (&weight)[2]
    ) const {
        held.first = item.column * OUTPUTS, held.valid = valid, held.expert = item.expert;
        held.targets[0] = targets[0], held.targets[1] = targets[1];
#pragma unroll
        for (int i = 0; i < TILE / 8; i++) {
            float* v = sums + i * 4;
            if constexpr (!GATED) finish(v, v, held.first + i * 8 + lane % 4 * 2, item.expert, {}, weight);
            held.words[2 * i] = narrow(v[0], v[1]), held.words[2 * i + 1] = narrow(v[2], v[3]);
        }
    }
    // Store PART columns of what is held, which are staged until there are STORED of them.
    __device__ __forceinline__ void store_part(const Held& held, int part) const {
        const int at = part * PART % STORED;
        if (at == 0) __syncwarp();  // what was staged before has been read
#pragma unroll
        for (int i = 0; i < PART / 8; i += 2) {
            const int block = part * PART / 8 + i;
            u32 words[4];
#pragma unroll
            for (int j = 0; j < 4; j += 2) {
                words[j] = held.words[block * 2 + j], words[j + 1] = held.words[block * 2 + j + 1];
                if constexpr (GATED) {
                    const u32 ups[2] = {held.words[OUTPUTS / 4 + block * 2 + j], held.words[OUTPUTS / 4 + block * 2 + j + 1]};
                    float v[4] = {widen(words[j]), widen(words[j] >> 16), widen(words[j + 1]), widen(words[j + 1] >> 16)};
                    const float up[4] = {widen(ups[0]), widen(ups[0] >> 16), widen(ups[1]), widen(ups[1] >> 16)};
                    finish(v, up, held.first + (block + j / 2) * 8 + lane % 4 * 2, held.expert, {}, {});
                    words[j] = narrow(v[0], v[1]), words[j + 1] = narrow(v[2], v[3]);
                }
            }
            store_matrices(staging + lane % 16 * PITCH + lane / 16 * 16 + (at + i * 8) * 2, words);
        }
        if (at + PART < STORED) return;
        int rows_to[ROUNDS];
        find_rows(rows_to, held.targets, held.valid);
        store_staged(rows_to, held.first + part * PART - at);
    }
};
