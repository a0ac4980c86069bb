// int4 weights for `widened_experts.cu`: they are dequantized to float16, as in `fragments.cu`.
//
// Lane (g, t) of a warp gets bytes 4 t to 4 t + 3 of 16 bytes, which are codes of 32 columns, by `ldmatrix`, and bytes 0 and 2, 1 and 3 of a word
// widen together.
//
// Defined before this text: GROUP (columns that share a scale and a zero point), row_scales.cu, whose scales are pairs of float16.

constexpr int STRIP = 1;                    // weight rows per row of a TMA box
constexpr int PIECES_OF_GROUP = GROUP / 32;  // of 16 bytes

// The weights of the codes in the low four bits of bytes 0 and 2, and of bytes 1 and 3; or of those in the high four bits.
template <bool HIGH> __device__ __forceinline__ uint2 widen_half(u32 bytes, const Numbers& own) {
    const uint4 all = widen_int4(bytes, own);
    return HIGH ? make_uint2(all.z, all.w) : make_uint2(all.x, all.y);
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
    // Sums of `N` pairs by both matrices of the group, and what sums of this lane's rows are multiplied by. Stages are released.
    template <int N> __device__ __forceinline__ void multiply_item(float (&sums)[2][N / 2], float (&row_factors)[2][2], Ring& ring) const {
        const int stages = stages_of(width), row = matrix_row(warp, lane);
        // Pieces of 16 bytes are swizzled. This lane gives the addresses of the first or the second one of the two of 64 columns.
        u32 codes = data + 2 * group * MATRIX_BYTES + row * CODE_BYTES + (lane / 16 ^ row / 2 % 4) * 16;
        asm volatile("" : "+r"(codes));  // the compiler would compute it again in each stage
        u32 fragments[2][2][4], scales[2];
        Numbers numbers[2][2];
        const int first = ring.stage;
#pragma unroll
        for (int high = 0; high < 2; high++)
            scales[high] = slots.scales() + (2 * group * MATRIX + 16 * warp + fragment_row(lane, high)) * SCALES;
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
#pragma unroll
                for (int q = 0; q < 2; q++) words[q] = matrices((codes ^ half * 32) + stage * STAGE_BYTES + q * MATRIX_BYTES);
#pragma unroll
                for (int k = 0; k < 4; k++) {  // 16 columns each: the low codes of 16 bytes, then the high ones, then those of the next 16 bytes
                    const int piece = 2 * half + k / 2;
                    if (k % 2 == 0 && piece % PIECES_OF_GROUP == 0) {
                        const int at = (4 * s + piece) / PIECES_OF_GROUP * 4;
#pragma unroll
                        for (int q = 0; q < 2; q++)
#pragma unroll
                            for (int high = 0; high < 2; high++) {  // past the last column, x is zero, and scales must be finite
                                u32 both = 0;
                                if (SCALES * PIECES_OF_GROUP % 16 == 0 || at < SCALES)
                                    asm volatile("ld.shared.u32 %0, [%1];"
                                                 : "=r"(both) : "r"(scales[high] + q * SCALE_BYTES_OF_MATRIX + at) : "memory");
                                numbers[q][high] = numbers_of(both);
                            }
                    }
                    u32(&pieces)[2][4] = fragments[k % 2];
#pragma unroll
                    for (int q = 0; q < 2; q++)
#pragma unroll
                        for (int high = 0; high < 2; high++) {
                            const u32 word = k < 2 ? high ? words[q].y : words[q].x : high ? words[q].w : words[q].z;
                            const uint2 two = k % 2 ? widen_half<true>(word, numbers[q][high]) : widen_half<false>(word, numbers[q][high]);
                            pieces[q][high] = two.x, pieces[q][2 + high] = two.y;
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
        for (int q = 0; q < 2; q++) {
#pragma unroll
            for (int j = 0; j < N / 2; j++) asm volatile("" : "+f"(sums[q][j])::"memory");
            row_factors[q][0] = row_factors[q][1] = 1.0f;
        }
    }
};
