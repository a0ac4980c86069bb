// int4 weights for `widened_experts.cu`: they are dequantized to float16, as in `fragments.cu`.
//
// Lane (g, t) of a warp gets bytes 4 t to 4 t + 3 of 16 bytes, which are codes of 32 columns, by `ldmatrix`, and bytes 0 and 2, 1 and 3 of a
// word widen together.
//
// Defined before this text: GROUP (columns that share a scale and a zero point, two float16 numbers), stage_scales.cu.

constexpr int STRIP = 1;                    // weight rows per row of a TMA box
constexpr int PIECES_OF_GROUP = GROUP / 32;  // of 16 bytes

// This lane's rows of both matrices of a warpgroup: two of each.
struct Rows {
    u32 codes, scales[2];
    Numbers numbers[2][2];

    __device__ __forceinline__ Rows(const Slots& slots, u32 data, int group, int warp, int lane) {
        const int row = matrix_row(warp, lane);
        // Pieces of 16 bytes are swizzled. This lane gives the addresses of the first or the second one of the two of 64 columns.
        codes = data + 2 * group * MATRIX_BYTES + row * CODE_BYTES + (lane / 16 ^ row / 2 % 4) * 16;
        asm volatile("" : "+r"(codes));  // the compiler would compute it again in each stage
#pragma unroll
        for (int high = 0; high < 2; high++)
            scales[high] = slots.scales() + (2 * group * MATRIX + 16 * warp + fragment_row(lane, high)) * SCALE_PITCH;
    }
    // Load the codes of half of stage `stage` of the ring.
    __device__ __forceinline__ void load(uint4 (&words)[2], int, int stage, int half) const {
#pragma unroll
        for (int q = 0; q < 2; q++) words[q] = matrices((codes ^ half * 32) + stage * STAGE_BYTES + q * MATRIX_BYTES);
    }
    // Load the scales and zero points of a piece of stage `stage` of the ring if a group begins with it.
    __device__ __forceinline__ void begin_piece(int stage, int piece) {
        if (piece % PIECES_OF_GROUP != 0) return;
#pragma unroll
        for (int q = 0; q < 2; q++)
#pragma unroll
            for (int high = 0; high < 2; high++) {
                const u32 at = scales[high] + stage * STAGE_SCALE_BYTES + q * SCALE_BYTES_OF_MATRIX + piece / PIECES_OF_GROUP * 4;
                u32 both;
                asm volatile("ld.shared.u32 %0, [%1];" : "=r"(both) : "r"(at) : "memory");
                numbers[q][high] = numbers_of(both);
            }
    }
    // Four weights of a word, for instruction `k` of four of half a stage.
    __device__ __forceinline__ uint2 widen(u32 word, int q, int high, int k) const {
        const uint4 all = widen_int4(word, numbers[q][high]);  // the compiler leaves out the half that is not used
        return k % 2 ? make_uint2(all.z, all.w) : make_uint2(all.x, all.y);
    }
    // What sums of a row are multiplied by.
    __device__ __forceinline__ float factor(int, int) const { return 1.0f; }
};
