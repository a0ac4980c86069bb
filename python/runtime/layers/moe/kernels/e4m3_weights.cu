// e4m3 weights for `widened_experts.cu`. They are converted without their scales; the sums over the 128 columns of a stage are multiplied by the
// scale of their block and added up in float32. The first GEMM, whose x is float16, multiplies in float16. The second multiplies in bfloat16,
// because its inputs may exceed the range of float16.
//
// The rows of a matrix have the same blocks of scales, and the columns of a stage are in one block.
//
// Defined before this text: STAGE_SCALES (slots for the scales of a stage, one for each matrix), widened_tiles.cu.

static_assert(MATRICES <= STAGE_SCALES);
constexpr int STRIP = 1;  // weight rows per row of a TMA box
constexpr int SCALE_BYTES = STAGES * STAGE_SCALES * 4, SCALE_COPIERS = MATRICES;  // lanes that copy the scales of a stage

// Scales [experts, rows of blocks, blocks], as in kernels/scale_layout.py.
struct Scales {
    const float* at;
    int expert_scales, row_scales, row_shift, column_shift;  // scales of an expert, of a row of blocks; log2 of rows and columns of a block
};

// The addresses of a stage's scales, which arrive together with its weights.
struct Slots {
    u32 data;

    __device__ __forceinline__ Slots(u32 data, u32) : data(data) {}
    __device__ __forceinline__ void init() const {}
    __device__ __forceinline__ u32 scale(int stage, int m) const { return data + SCALES_AT + (stage * STAGE_SCALES + m) * 4; }
};

// The scales' part of the loading warp: one lane per matrix copies the scales of its stages.
struct ScaleLoader {
    Scales scales;
    Slots slots;
    const float* from = nullptr;

    __device__ __forceinline__ void load_item(const Item& item, const int (&)[MATRICES], int, int rows, int lane) {
        const int row = lane < MATRICES ? first_row(item, lane, rows) : -1;
        from = row < 0 ? nullptr : scales.at + (long)item.expert * scales.expert_scales + (row >> scales.row_shift) * scales.row_scales;
    }
    __device__ __forceinline__ void load_stage(const Ring& ring, int s, int lane) const {
        if (from != nullptr) copy<4>(slots.scale(ring.stage, lane), from + (s * DEPTH >> scales.column_shift));
        if (lane < SCALE_COPIERS) barrier_arrive_after_copies(ring.full_here());
    }
};

// The weights' part of a multiplying warpgroup.
struct Widener {
    Slots slots;
    u32 data;
    int width, group, warp, lane;

    __device__ __forceinline__ void begin_item() const {}
    __device__ __forceinline__ void end_item() const {}

    // Loads the codes of 32 columns of this lane's rows of both matrices. `from` is the address for the first 32 columns of a stage; pieces of
    // 16 bytes are swizzled.
    __device__ __forceinline__ void load_words(uint4 (&words)[2], u32 from, int columns) const {
#pragma unroll
        for (int q = 0; q < 2; q++) words[q] = matrices((from ^ columns) + q * MATRIX_BYTES);
    }
    // The left operands of two instructions for each matrix.
    __device__ __forceinline__ void widen_words(u32 (&fragments)[2][2][4], const uint4 (&words)[2]) const {
#pragma unroll
        for (int q = 0; q < 2; q++) {
            widen_four<GATED>(words[q].x, fragments[0][q][2], fragments[0][q][0]);
            widen_four<GATED>(words[q].y, fragments[0][q][3], fragments[0][q][1]);
            widen_four<GATED>(words[q].z, fragments[1][q][2], fragments[1][q][0]);
            widen_four<GATED>(words[q].w, fragments[1][q][3], fragments[1][q][1]);
        }
    }
    // Waits for a stage, converts its first 32 columns, and loads the next ones into `words`.
    __device__ __forceinline__ void begin_stage(const Ring& ring, u32 (&fragments)[2][2][4], uint4 (&words)[2], u32 from) const {
        ring.wait_full();
        load_words(words, from, 0);
        widen_words(fragments, words);
        load_words(words, from, 32);
    }
    // Computes the sums of `N` pairs for both matrices of the group, and the factors of this lane's rows. Releases the stages.
    template <int N> __device__ __forceinline__ void multiply_item(float (&sums)[2][N / 2], float (&row_factors)[2][2], Ring& ring) const {
        constexpr int BATCHES = DEPTH / 32;  // batches of 32 columns per stage
        const int stages = stages_of(width), row = matrix_row(warp, lane);
        const u32 codes = data + 2 * group * MATRIX_BYTES + row * CODE_BYTES + (lane / 16 ^ row % 8) * 16;
        float part[2][N / 2];
        u32 fragments[2][2][2][4];  // those of a batch and of the next
        uint4 words[2];
#pragma unroll
        for (int q = 0; q < 2; q++) {
            row_factors[q][0] = row_factors[q][1] = GATED ? 256.0f : 1.0f;
#pragma unroll
            for (int j = 0; j < N / 2; j++) sums[q][j] = 0.0f;
        }
        int stage = uniform(ring.stage);  // so that descriptors stay in uniform registers
        begin_stage(ring, fragments[0], words, codes + stage * STAGE_BYTES);
#pragma unroll 1
        for (int s = 0; s < stages; s++) {
            const u32 here = codes + stage * STAGE_BYTES, scales = slots.scale(stage, 2 * group);
            const u64 x = descriptor(data + stage * STAGE_BYTES + W_BYTES), constant = x & ~0xFFFFFFFFull;  // offsets change only the lower half
            float factors[2];
            asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(factors[0]), "=f"(factors[1]) : "r"(scales) : "memory");
#pragma unroll
            for (int b = 0; b < BATCHES; b++) {
                if (b > 0) widen_words(fragments[b % 2], words);
                if (b > 0 && b + 1 < BATCHES) load_words(words, here, (b + 1) * 32);
                asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
                for (int k = 0; k < 2; k++)
#pragma unroll
                    for (int q = 0; q < 2; q++)
                        multiply(
                            part[q], fragments[b % 2][k][q], constant | (u32)x + b / 2 * (HALF_BYTES / 16) + (b % 2 * 2 + k) * 2, b > 0 || k > 0
                        );
                asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
                if (b > 0) asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
            }
            const u32 empty = ring.empty + stage * 8;
            stage = stage + 1 == STAGES ? 0 : stage + 1;
            ring.next();
            // While the tensor cores multiply the last batch:
            if (s + 1 < stages) begin_stage(ring, fragments[0], words, codes + stage * STAGE_BYTES);
            asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
            release(empty, lane);
#pragma unroll
            for (int q = 0; q < 2; q++)
#pragma unroll
                for (int j = 0; j < N / 2; j++) {
                    asm volatile("" : "+f"(part[q][j])::"memory");
                    sums[q][j] += part[q][j] * factors[q];
                }
        }
    }
};
