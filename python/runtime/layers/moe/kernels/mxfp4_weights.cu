// MXFP4 weights for `widened_experts.cu`: they are dequantized to float16 with scale / max row scale; the sums are multiplied by the row
// maximum.
//
// Weights are core matrices of eight rows by 16 bytes. A row of a box has those of eight rows, in elements of eight bytes.
//
// Lane (g, t) of a warp gets bytes 4 t to 4 t + 3 of the 16 bytes that share a scale, by `ldmatrix`, and bytes 0 and 2, 1 and 3 of a word widen
// together.
//
// Defined before this text: row_scales.cu, whose scales are uint8, one of each 32 columns.

constexpr int STRIP = 8, CORE_BYTES = 16 * STRIP;  // rows of weights in one of a box

// ld.shared.u16: the scales of two groups, one byte each.
__device__ __forceinline__ u32 load_scales(u32 from) {
    u16 both;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(both) : "r"(from) : "memory");
    return both;
}
__device__ __forceinline__ u32 max_signed2(u32 a, u32 b) {
    u32 out;
    asm("max.s16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
    return out;
}
__device__ __forceinline__ u32 add2(u32 a, u32 b) {
    u32 out;
    asm("add.u16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
    return out;
}
// The scales of two groups, a byte each, as float16 factors 2^15 times the scale over the largest of the row; what is less than 2^-14 becomes 0.
// `top`: 30 less that largest one, twice.
__device__ __forceinline__ u32 factors_of(u32 scales, u32 top) {
    return max_signed2(add2(__byte_perm(scales, 0, 0x4140), top), 0) << 10;
}
// Two numbers in float16 times the first factor of two, or the second.
template <bool SECOND> __device__ __forceinline__ u32 scaled(u32 x, u32 factors) {
    u32 y;
    if (SECOND)
        asm("{\n.reg .b16 low, high;\n.reg .b32 both;\nmov.b32 {low, high}, %2;\nmov.b32 both, {high, high};\nmul.rn.f16x2 %0, %1, both;\n}"
            : "=r"(y) : "r"(x), "r"(factors));
    else
        asm("{\n.reg .b16 low, high;\n.reg .b32 both;\nmov.b32 {low, high}, %2;\nmov.b32 both, {low, low};\nmul.rn.f16x2 %0, %1, both;\n}"
            : "=r"(y) : "r"(x), "r"(factors));
    return y;
}

// This lane's rows of both matrices of a warpgroup: two of each.
struct Rows {
    u32 codes, scales[2], largest[2], tops[2][2], factors[2][2];  // largest scales, those of the second matrix in the upper halves

    __device__ __forceinline__ Rows(const Slots& slots, u32 data, int group, int warp, int lane) {
        const u32 scales_of_warp = slots.scales() + (2 * group * MATRIX + 16 * warp) * SCALES;
        find_largest(scales_of_warp, lane);
        const int row = matrix_row(warp, lane), chunk = lane / 16;
        codes = data + 2 * group * MATRIX_BYTES + row / STRIP * (STRIP * CODE_BYTES) + chunk * CORE_BYTES + row % STRIP * 16;
        asm volatile("" : "+r"(codes));  // the compiler would compute it again in each stage
#pragma unroll
        for (int high = 0; high < 2; high++) {
            scales[high] = scales_of_warp + fragment_row(lane, high) * SCALES;
#pragma unroll
            for (int q = 0; q < 2; q++) tops[q][high] = __byte_perm(30 - (largest[high] >> 16 * q & 0xFF), 0, 0x1010);
        }
    }
    // `from`: the scales of row 0 of the warp.
    __device__ __forceinline__ void find_largest(u32 from, int lane) {
#pragma unroll
        for (int high = 0; high < 2; high++) {
            const u32 own = from + fragment_row(lane, high) * SCALES;
            u32 low_bytes = 0, words = 0;
#pragma unroll
            for (int j = 2 * (lane % 4); j < SCALES; j += 8) {
                const u32 both = load_scales(own + j) | load_scales(own + SCALE_BYTES_OF_MATRIX + j) << 16;
                words = max2(words, both), low_bytes = max2(low_bytes, both & 0x00FF00FF);
            }
            u32 most = max2(low_bytes, words >> 8 & 0x00FF00FF);
            most = max2(most, __shfl_xor_sync(~0u, most, 1));
            largest[high] = max2(most, __shfl_xor_sync(~0u, most, 2));
        }
    }
    // Load the codes of half of stage `s` of the row, and their scales; `stage`: of the ring.
    __device__ __forceinline__ void load(uint4 (&words)[2], int s, int stage, int half) {
#pragma unroll
        for (int q = 0; q < 2; q++) {
            words[q] = matrices(codes + stage * STAGE_BYTES + q * MATRIX_BYTES + half * (2 * CORE_BYTES));
#pragma unroll
            for (int high = 0; high < 2; high++) {  // past the last column, codes are zeros, whose scale must be finite
                const u32 two = SCALES % 4 == 0 || 4 * s + 2 * half < SCALES
                    ? load_scales(scales[high] + q * SCALE_BYTES_OF_MATRIX + 4 * s + 2 * half)
                    : 0;
                factors[q][high] = factors_of(two, tops[q][high]);
            }
        }
    }
    __device__ __forceinline__ void begin_piece(int, int) const {}
    // Four weights of a word, for instruction `k` of four of half a stage.
    __device__ __forceinline__ uint2 widen(u32 word, int q, int high, int k) const {
        const uint2 two = k % 2 ? widen_second_e2m1(word) : widen_first_e2m1(word);
        const u32 both = factors[q][high];
        if (k < 2) return make_uint2(scaled<false>(two.x, both), scaled<false>(two.y, both));
        return make_uint2(scaled<true>(two.x, both), scaled<true>(two.y, both));
    }
    // What sums of a row are multiplied by.
    __device__ __forceinline__ float factor(int q, int high) const {
        return __uint_as_float((u32)max((int)(largest[high] >> 16 * q & 0xFF) - 1, 0) << 23);
    }
};
