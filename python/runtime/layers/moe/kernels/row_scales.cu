// Scales of groups of columns, of which rows have several, for `widened_experts.cu`: those of a tile's rows are in shared memory at once.
// Scales of a matrix are adjacent in memory and loaded in one copy.
//
// Defined before this text: SLOTS (of the scales of a tile), SCALES (bytes of a row), widened_tiles.cu.

constexpr int SCALE_BYTES_OF_MATRIX = MATRIX * SCALES, SLOT_BYTES = MATRICES * SCALE_BYTES_OF_MATRIX;
constexpr int SCALE_BYTES = SLOTS * SLOT_BYTES, SCALE_COPIERS = 0;  // lanes that copy the scales of a stage

struct Scales { const u8* at; };  // [experts, rows, SCALES]

// Slots for the scales of tiles, used round robin: a barrier of each for its bytes, then one of each for the warps that have read them.
struct Slots {
    u32 data, barriers;
    int slot = 0, round = 0;

    __device__ __forceinline__ Slots(u32 data, u32 barriers) : data(data), barriers(barriers) {}
    __device__ __forceinline__ void init() const {
        for (int s = 0; s < SLOTS; s++) barrier_init(barriers + s * 8, 1), barrier_init(barriers + (SLOTS + s) * 8, MULTIPLIERS / 32);
    }
    __device__ __forceinline__ u32 full() const { return barriers + 8 * slot; }
    __device__ __forceinline__ u32 empty() const { return full() + 8 * SLOTS; }
    __device__ __forceinline__ u32 scales() const { return data + SCALES_AT + slot * SLOT_BYTES; }
    __device__ __forceinline__ void begin_item() const { barrier_wait(full(), round & 1); }
    __device__ __forceinline__ void end_item(int lane) {
        release(empty(), lane);
        next();
    }
    __device__ __forceinline__ void next() {
        if (++slot == SLOTS) slot = 0, round++;
    }
};

// The scales' part of the loading warp.
struct ScaleLoader {
    Scales scales;
    Slots slots;

    // `starts`: the first rows of the matrices among those of all experts, -1 if the item has fewer; `boxes`: how many it has.
    __device__ __forceinline__ void load_item(const Item& item, const int (&starts)[MATRICES], int boxes, int rows, int lane) {
        if (lane == 0) {
            if (slots.round > 0) barrier_wait(slots.empty(), (slots.round - 1) & 1);
            barrier_expect(slots.full(), boxes * SCALE_BYTES_OF_MATRIX);
#pragma unroll
            for (int m = 0; m < MATRICES; m++) {
                const u32 to = slots.scales() + m * SCALE_BYTES_OF_MATRIX;
                if (starts[m] >= 0) copy_bulk(to, scales.at + (long)starts[m] * SCALES, SCALE_BYTES_OF_MATRIX, slots.full());
            }
        }
        slots.next();
    }
    __device__ __forceinline__ void load_stage(const Ring&, int, int) const {}
};
