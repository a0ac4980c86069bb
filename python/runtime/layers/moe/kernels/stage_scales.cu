// Scales of groups of columns for `widened_experts.cu`: those of a stage arrive with its weights. Those of whole rows, as in
// row_scales.cu, would leave room for fewer stages, or for none.
//
// Defined before this text: GROUP (columns that share a scale of four bytes), SCALES (bytes of a row), SCALE_COPY (bytes that are copied at
// once: less than those of a stage if the last stage is cut), widened_tiles.cu.

constexpr int SCALE_PITCH = 4 * DEPTH / GROUP;  // bytes from row to row, all of a stage
constexpr int SCALE_BYTES_OF_MATRIX = MATRIX * SCALE_PITCH, STAGE_SCALE_BYTES = MATRICES * SCALE_BYTES_OF_MATRIX;
constexpr int SCALE_BYTES = STAGES * STAGE_SCALE_BYTES, SCALE_COPIERS = 32;  // lanes that copy the scales of a stage

struct Scales { const u8* at; };  // [experts, rows, SCALES]

struct Slots {
    u32 data;

    __device__ __forceinline__ Slots(u32 data, u32) : data(data) {}
    __device__ __forceinline__ void init() const {}
    __device__ __forceinline__ u32 scales() const { return data + SCALES_AT; }
    __device__ __forceinline__ void begin_item() const {}
    __device__ __forceinline__ void end_item(int) const {}
};

// The scales' part of the loading warp: each lane copies those of two rows of each matrix.
struct ScaleLoader {
    Scales scales;
    Slots slots;
    int starts[MATRICES];  // as in `load_item`

    // `starts`: the first rows of the matrices among those of all experts, -1 if the item has fewer.
    __device__ __forceinline__ void load_item(const Item&, const int (&starts)[MATRICES], int, int, int) {
#pragma unroll
        for (int m = 0; m < MATRICES; m++) this->starts[m] = starts[m];
    }
    __device__ __forceinline__ void load_stage(const Ring& ring, int s, int lane) const {
        const u32 to = slots.scales() + ring.stage * STAGE_SCALE_BYTES + lane * SCALE_PITCH;
#pragma unroll
        for (int m = 0; m < MATRICES; m++) {
            if (starts[m] < 0) continue;
            const u8* from = scales.at + (long)(starts[m] + lane) * SCALES + s * SCALE_PITCH;
#pragma unroll
            for (int part = 0; part < SCALE_PITCH; part += SCALE_COPY) {
                const bool in = SCALE_COPY == SCALE_PITCH || s * SCALE_PITCH + part < SCALES;  // past the last column, x and scales are zero
#pragma unroll
                for (int row = 0; row < MATRIX; row += 32)
                    copy<SCALE_COPY>(
                        to + m * SCALE_BYTES_OF_MATRIX + row * SCALE_PITCH + part, in ? from + row * SCALES + part : scales.at, in
                    );
            }
        }
        barrier_arrive_after_copies(ring.full_here());
    }
};
