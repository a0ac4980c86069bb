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

// What a multiplying warpgroup does with weights.
struct Widener {
    Slots slots;
    u32 data;
    int width, group, warp, lane;

    __device__ __forceinline__ void begin_item() const { barrier_wait(slots.full(), slots.round & 1); }
    __device__ __forceinline__ void end_item() {
        release(slots.empty(), lane);
        slots.next();
    }
    // The largest scales of this lane's rows of both matrices, of the second matrix in the upper halves. `scales`: of row 0 of the warp.
    __device__ __forceinline__ void find_largest(u32 (&largest)[2], u32 scales) const {
#pragma unroll
        for (int high = 0; high < 2; high++) {
            const u32 from = scales + fragment_row(lane, high) * SCALES;
            u32 low_bytes = 0, words = 0;
#pragma unroll
            for (int j = 2 * (lane % 4); j < SCALES; j += 8) {
                const u32 both = load_scales(from + j) | load_scales(from + SCALE_BYTES_OF_MATRIX + j) << 16;
                words = max2(words, both), low_bytes = max2(low_bytes, both & 0x00FF00FF);
            }
            u32 most = max2(low_bytes, words >> 8 & 0x00FF00FF);
            most = max2(most, __shfl_xor_sync(~0u, most, 1));
            largest[high] = max2(most, __shfl_xor_sync(~0u, most, 2));
        }
    }
    // Sums of `N` pairs by both matrices of the group, and what sums of this lane's rows are multiplied by. Stages are released.
    template <int N> __device__ __forceinline__ void multiply_item(float (&sums)[2][N / 2], float (&row_factors)[2][2], Ring& ring) const {
        const u32 scales_of_warp = slots.scales() + (2 * group * MATRIX + 16 * warp) * SCALES;
        u32 largest[2];
        find_largest(largest, scales_of_warp);
        const int stages = stages_of(width), row = matrix_row(warp, lane), chunk = lane / 16;
        u32 codes = data + 2 * group * MATRIX_BYTES + row / STRIP * (STRIP * CODE_BYTES) + chunk * CORE_BYTES + row % STRIP * 16;
        u32 fragments[2][2][4], tops[2][2], scales[2];
        asm volatile("" : "+r"(codes));  // the compiler would compute it again in each stage
        const int first = ring.stage;
#pragma unroll
        for (int high = 0; high < 2; high++) {
            scales[high] = scales_of_warp + fragment_row(lane, high) * SCALES;
#pragma unroll
            for (int q = 0; q < 2; q++) tops[q][high] = __byte_perm(30 - (largest[high] >> 16 * q & 0xFF), 0, 0x1010);
        }
#pragma unroll 1
        for (int round = 0; round < first + stages; round += STAGES)
#pragma unroll
        for (int stage = 0; stage < STAGES; stage++) {  // a constant in each copy, so that descriptors are in uniform registers
            const int s = round + stage - first, before = (stage + STAGES - 1) % STAGES;
            if (s < 0 || s >= stages) continue;
            ring.wait_full();
            const u64 x = descriptor(data + stage * STAGE_BYTES + W_BYTES), constant = x & ~0xFFFFFFFFull;  // offsets never reach the upper half
#pragma unroll
            for (int half = 0; half < 2; half++) {
                uint4 words[2];
                u32 factors[2][2];
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
#pragma unroll
                for (int k = 0; k < 4; k++) {  // 16 columns each: the first codes of 16 bytes, then the second ones, then those of the next 16 bytes
                    u32(&pieces)[2][4] = fragments[k % 2];
#pragma unroll
                    for (int q = 0; q < 2; q++)
#pragma unroll
                        for (int high = 0; high < 2; high++) {
                            const u32 word = k < 2 ? high ? words[q].y : words[q].x : high ? words[q].w : words[q].z;
                            const uint2 two = k % 2 ? widen_second_e2m1(word) : widen_first_e2m1(word);
                            pieces[q][high] = k < 2 ? scaled<false>(two.x, factors[q][high]) : scaled<true>(two.x, factors[q][high]);
                            pieces[q][2 + high] = k < 2 ? scaled<false>(two.y, factors[q][high]) : scaled<true>(two.y, factors[q][high]);
                        }
                    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
                    for (int q = 0; q < 2; q++)
                        multiply(sums[q], pieces[q], constant | (u32)x + half * (HALF_BYTES / 16) + k * 2, s > 0 || half > 0 || k > 0);
                    asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 1;" ::: "memory");
                    if (half == 0 && k == 0 && s > 0) release(ring.empty + before * 8, lane);  // all wgmma of the previous stage have completed
                }
            }
            ring.next();
        }
        asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
        release(ring.empty + (ring.stage + STAGES - 1) % STAGES * 8, lane);
#pragma unroll
        for (int q = 0; q < 2; q++)
#pragma unroll
            for (int j = 0; j < N / 2; j++) asm volatile("" : "+f"(sums[q][j])::"memory");
#pragma unroll
        for (int q = 0; q < 2; q++)
#pragma unroll
            for (int high = 0; high < 2; high++)
                row_factors[q][high] = __uint_as_float((u32)max((int)(largest[high] >> 16 * q & 0xFF) - 1, 0) << 23);
    }
};
