// The weights' part of a multiplying warpgroup of `widened_experts.cu`, for formats whose rows have several scales.
//
// Defined before this text: row_scales.cu or stage_scales.cu, and `Rows` in the file of the format.

struct Widener {
    Slots slots;
    u32 data;
    int width, group, warp, lane;

    __device__ __forceinline__ void begin_item() const { slots.begin_item(); }
    __device__ __forceinline__ void end_item() { slots.end_item(lane); }
    // Sums of `N` pairs by both matrices of the group, and what sums of this lane's rows are multiplied by. Stages are released.
    template <int N> __device__ __forceinline__ void multiply_item(float (&sums)[2][N / 2], float (&row_factors)[2][2], Ring& ring) const {
        Rows rows(slots, data, group, warp, lane);
        const int stages = stages_of(width), first = ring.stage;
        u32 fragments[2][2][4];
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
                rows.load(words, s, stage, half);
#pragma unroll
                for (int k = 0; k < 4; k++) {  // 16 columns each: the first codes of 16 bytes, the second ones, those of the next 16 bytes
                    if (k % 2 == 0) rows.begin_piece(stage, 2 * half + k / 2);
                    u32(&pieces)[2][4] = fragments[k % 2];
#pragma unroll
                    for (int q = 0; q < 2; q++)
#pragma unroll
                        for (int high = 0; high < 2; high++) {
                            const u32 word = k < 2 ? high ? words[q].y : words[q].x : high ? words[q].w : words[q].z;
                            const uint2 four = rows.widen(word, q, high, k);
                            pieces[q][high] = four.x, pieces[q][2 + high] = four.y;
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
#pragma unroll
            for (int high = 0; high < 2; high++) row_factors[q][high] = rows.factor(q, high);
        }
    }
};
