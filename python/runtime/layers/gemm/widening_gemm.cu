// out = epilogue(x @ w.T) (epilogue.py) for weights in e4m3 or int4 with scales, and rows of x in bfloat16. Tensor cores multiply in bfloat16.
//
// A block computes 128 weight rows by up to TOKENS rows of x. Weights are the left operand of wgmma, whose fragments are registers: a
// thread reads stored numbers from shared memory and converts them without their scales, while the tensor cores multiply the previously
// converted ones. x is the right operand, unchanged in shared memory. Sums of 128 columns are multiplied by the scales of the weights, then
// added up in float32.
//
// One thread issues TMA loads into a ring of stages of 128 columns. Weights depend on nothing, so the ring is filled with them while the
// previous kernel still runs (programmatic dependent launch), and the first are widened; loads of x wait for that kernel to end.
//
// An int4 weight is `(code - zero) * scale`. Zero points are integers, so the difference is exact in bfloat16. With groups of 128 columns the scale
// is applied to sums, as for e4m3; in smaller groups the difference is multiplied by the scale in bfloat16.
//
// SPLIT blocks of a cluster split K. Each gets the sums of its own rows of x from all of them, and adds these in order.
//
// Defined before this text: GROUP (columns of a group of int4 weights; 0 for e4m3), TOKENS (rows of x of a block, a multiple of 8 up to
// 128), SPLIT, STAGES (of the ring), EARLY; multiply(), the instruction whose operands depend on TOKENS. ROWS = 128, CLUSTER_M = CLUSTER_N = 1,
// LOADERS (threads) and LOAD_REGISTERS for wgmma_parts.cu. TILE = 32 or with a gate 64 (columns of sums that a warp finishes together),
// SHARERS = 1, BFLOAT16 = 1, BIAS, WRITE, STORE = 1, ARGMAX = 0, SCALE and DEFER for wgmma_output.cu.

constexpr int DEPTH = 128;                         // columns of a stage
constexpr bool INT4 = GROUP > 0;
constexpr int GROUPS_OF_STAGE = INT4 ? DEPTH / GROUP : 1;
constexpr int W_ROW_BYTES = INT4 ? DEPTH / 2 : DEPTH;
constexpr int W_BYTES = ROWS * W_ROW_BYTES, X_BOX_BYTES = TOKENS * ROW_BYTES, X_BYTES = DEPTH / COLUMNS * X_BOX_BYTES;
constexpr int STEPS = COLUMNS / 16;                // instructions for a box of x
constexpr int BLOCK_OUTPUTS = ROWS / HALVES;       // columns of `out`
constexpr int PIECES = BLOCK_OUTPUTS / OUTPUTS;    // of these, which warps finish one by one
constexpr int TOKEN_GROUPS = TOKENS / 8, OWN_TOKEN_GROUPS = (TOKEN_GROUPS + SPLIT - 1) / SPLIT, OWN_TOKENS = OWN_TOKEN_GROUPS * 8;
constexpr int EXCHANGE_BYTES = SPLIT > 1 ? SPLIT * OWN_TOKEN_GROUPS * MULTIPLIERS * 16 : 0;
constexpr int PITCH = ROWS + 4;                    // sums of a token in shared memory: the lanes of a warp store to different banks
static_assert(EXCHANGE_BYTES + (OWN_TOKENS + 8) * PITCH * 4 <= STAGES * (W_BYTES + X_BYTES), "the sums take the place of the ring");

__device__ __forceinline__ u32 load_word(u32 from) {
    u32 word;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(from) : "memory");
    return word;
}

// A barrier of the threads that multiply.
__device__ __forceinline__ void sync_multipliers() { asm volatile("bar.sync 1, %0;" ::"n"(MULTIPLIERS) : "memory"); }

// The left operands of the instructions for one box of x: 16 rows of the warp by 64 columns, of which `half` counts.
//
// Lane (g, t) needs columns 2 t and 2 t + 1 of each group of eight, in rows g and g + 8. In each row these are the same half of a word;
// `pick` selects it from both rows. `from`: this lane's word of the first eight columns of row g; pieces of 16 bytes are swizzled.
__device__ __forceinline__ void widen_half(u32 (&fragments)[STEPS][4], u32 from, int half, u32 pick) {
#pragma unroll
    for (int k = 0; k < STEPS; k++) {
        const u32 at = from ^ (half * STEPS + k) * 16;
#pragma unroll
        for (int eight = 0; eight < 2; eight++) {
            const u32 low = load_word(at + eight * 8), high = load_word(at + eight * 8 + 8 * DEPTH);
            widen_four<false>(__byte_perm(low, high, pick), fragments[k][2 * eight], fragments[k][2 * eight + 1]);
        }
    }
}

// The scales of the weights (kernels/scale_layout.py).
struct Scales {
    const float* at;                           // for int4, pairs of float16
    int row_scales, scale_rows, column_shift;  // scales of a row of blocks; rows of a block; log2 of its columns

    __device__ __forceinline__ const float* row(int i) const { return at + (long)(i / scale_rows) * row_scales; }
};

// The scales of a stage in a row; for int4, pairs of scale and zero point.
struct Factors {
    u32 words[GROUPS_OF_STAGE];

    // `last`: the last block of the row. The columns of a stage that are past the row's end are multiplied by zeros.
    __device__ __forceinline__ void load(const float* row, int block, int last) {
#pragma unroll
        for (int i = 0; i < GROUPS_OF_STAGE; i++) words[i] = ((const u32*)row)[GROUPS_OF_STAGE > 1 ? min(block + i, last) : block];
    }
    // The factor of sums over the stage.
    __device__ __forceinline__ float of_sums() const {
        if constexpr (GROUPS_OF_STAGE > 1) return 1.0f;
        return INT4 ? of_f16(words[0] & 0xFFFF) : __uint_as_float(words[0]);
    }
};

// Converts int4 codes of one row and one group.
struct Group {
    u32 minus_zero, scale;  // of two numbers each

    __device__ __forceinline__ Group(u32 both) {
        const float own = group_scale(both, minus_zero);
        scale = to_bf16x2(own, own);
    }
    __device__ __forceinline__ u32 widen(u32 codes) const {
        const u32 difference = widen_codes(codes, minus_zero);
        if constexpr (GROUPS_OF_STAGE == 1) return difference;
        u32 out;
        asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(out) : "r"(difference), "r"(scale));
        return out;
    }
};

// `widen_half` for int4. A byte holds two columns, which are 16 columns apart.
__device__ __forceinline__ void widen_half_int4(
    u32 (&fragments)[STEPS][4], u32 from, int half, u32 pick, const Factors& low_factors, const Factors& high_factors
) {
#pragma unroll
    for (int k = 0; k < STEPS; k += 2) {  // runs of 32 columns
        const int run = (half * STEPS + k) / 2, group = run * 32 * GROUPS_OF_STAGE / DEPTH;
        const Group low_group(low_factors.words[group]), high_group(high_factors.words[group]);
        const u32 at = from ^ run * 16;
#pragma unroll
        for (int eight = 0; eight < 2; eight++) {
            const u32 low = load_word(at + eight * 8), high = load_word(at + eight * 8 + 8 * W_ROW_BYTES);
            const u32 four = __byte_perm(low, high, pick);
#pragma unroll
            for (int upper = 0; upper < 2; upper++) {
                fragments[k + upper][2 * eight] = low_group.widen(four >> (8 + 4 * upper));
                fragments[k + upper][2 * eight + 1] = high_group.widen(four >> 4 * upper);
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(MULTIPLIERS + LOADERS, 1)
widening_gemm(const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap w_map, const Scales scales, void* out,
              const u16* bias, Norms norms, int rows, int columns, int width) {
    extern __shared__ char unaligned[];
    __shared__ u64 barriers[3 * STAGES + (SPLIT > 1)];  // of each stage: weights have arrived, empty, x has arrived; then: sums have arrived
    __shared__ float factors[ROWS];
    const u32 data = (shared_address(unaligned) + 1023) & ~1023u;
    Ring ring(data, shared_address(barriers), W_BYTES + X_BYTES, STAGES);
    const u32 x_barriers = ring.empty + STAGES * 8, arrived = x_barriers + STAGES * 8;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const Place place;
    const int m_tiles = (rows + TOKENS - 1) / TOKENS, n_tiles = (columns + BLOCK_OUTPUTS - 1) / BLOCK_OUTPUTS;
    const int m_tile = blockIdx.x / SPLIT % m_tiles, n_tile = blockIdx.x / SPLIT / m_tiles;
    const int blocks = (width + DEPTH - 1) / DEPTH, each = (blocks + SPLIT - 1) / SPLIT, first = place.part * each;
    const int steps = max(min(each, blocks - first), 0);
    if constexpr (EARLY) launch_next();
    if (threadIdx.x == 0) {
        ring.init();
        for (int s = 0; s < STAGES; s++) barrier_init(x_barriers + s * 8, 1);
        if constexpr (SPLIT > 1) barrier_init(arrived, 1);
        publish_barriers();
        if constexpr (SPLIT > 1) expect_sums<TOKEN_GROUPS, OWN_TOKEN_GROUPS>(arrived, place);
    }
    __syncthreads();

    if (warp >= MULTIPLIERS / 32) {
        leave_registers<LOAD_REGISTERS>();
        if (threadIdx.x == MULTIPLIERS) {
            const u64 w_policy = m_tiles == 1 ? EVICT_FIRST : EVICT_NORMAL;
            auto load_w = [&](int s) {
                barrier_expect(ring.full_here(), W_BYTES);
#pragma unroll
                for (int box = 0; box < HALVES; box++)  // gates, then ups
                    load_box<false>(ring.here() + box * BLOCK_OUTPUTS * W_ROW_BYTES, &w_map, ring.full_here(), (first + s) * W_ROW_BYTES,
                                    box * columns + n_tile * BLOCK_OUTPUTS, w_policy, 0);
            };
            auto load_x = [&](int s) {
                const u32 barrier = x_barriers + ring.stage * 8;
                barrier_expect(barrier, X_BYTES);
#pragma unroll
                for (int box = 0; box < DEPTH / COLUMNS; box++)
                    load_box<false>(ring.here() + W_BYTES + box * X_BOX_BYTES, &x_map, barrier, (first + s) * DEPTH + box * COLUMNS,
                                    m_tile * TOKENS, EVICT_LAST, 0);
            };
            const int ahead = min(steps, STAGES);
            const Ring start = ring;
            for (int s = 0; s < ahead; s++, ring.next()) load_w(s);
            wait_for_previous();
            ring = start;
            for (int s = 0; s < ahead; s++, ring.next()) load_x(s);
            for (int s = ahead; s < steps; s++, ring.next()) {
                ring.wait_empty();
                load_w(s);
                load_x(s);
            }
        }
        if constexpr (SPLIT > 1) cluster_sync<false>();
        return;
    }

    take_registers<MULTIPLY_REGISTERS>();
    const int g = lane / 4, t = lane % 4, tile_row = warp * 16 + g;  // of the weights; the other row of the thread is 8 further on
    const int row = tile_row / BLOCK_OUTPUTS * columns + n_tile * BLOCK_OUTPUTS + tile_row % BLOCK_OUTPUTS;
    const int last_row = columns * HALVES - 1;
    const float *low_scales = scales.row(min(row, last_row)), *high_scales = scales.row(min(row + 8, last_row));
    const u32 offset = tile_row * W_ROW_BYTES + (INT4 ? g / 2 : g) * 16 + t / 2 * 4, pick = t % 2 ? 0x3726 : 0x1504;
    float sums[TOKENS / 2], part[TOKENS / 2];
#pragma unroll
    for (int i = 0; i < TOKENS / 2; i++) sums[i] = part[i] = 0.0f;
    u32 fragments[2][STEPS][4];
    Factors low_factors = {}, high_factors = {};
    const auto widen_weights = [&](int half, u32 from) {
        if constexpr (INT4) widen_half_int4(fragments[half], from, half, pick, low_factors, high_factors);
        else widen_half(fragments[half], from, half, pick);
    };
    const auto begin_stage = [&](int s) {
        const int block = (first + s) * DEPTH >> scales.column_shift;
        const int last = (width - 1) >> scales.column_shift;
        low_factors.load(low_scales, block, last), high_factors.load(high_scales, block, last);
        ring.wait_full();
        widen_weights(0, ring.here() + offset);
    };
    if (steps > 0) begin_stage(0);
    wait_for_previous();
    const int own_first = m_tile * TOKENS + place.part * OWN_TOKENS;  // rows of x that this block stores, and where they end
    const int own_end = min(min(own_first + OWN_TOKENS, (m_tile + 1) * TOKENS), rows);
    Output output = {out, bias, norms, own_end, columns, own_first + warp * 16 + g};
    if (SCALE && warp * 16 < OWN_TOKENS) {  // each warp computes the factors of 16 rows of x
        output.find_scale(width);
        if (t == 0) factors[warp * 16 + g] = output.scale[0], factors[warp * 16 + g + 8] = output.scale[1];
    }

    // An item of this warp: 16 rows of x by one piece of the block's outputs. What its results need besides the sums is loaded ahead.
    const auto take = [&](int item) {
        output.row = own_first + item / PIECES * 16 + g;
        output.column = n_tile * BLOCK_OUTPUTS + item % PIECES * OUTPUTS + 2 * t;
        return output.before();
    };
    Before before = take(warp);

    for (int s = 0; s < steps; s++) {
        const int stage = ring.stage;
        const u32 w_here = ring.here() + offset;
        const u64 x_here = descriptor(ring.here() + W_BYTES), x_next = descriptor(ring.here() + W_BYTES + X_BOX_BYTES);
        const float low = low_factors.of_sums(), high = high_factors.of_sums();
        barrier_wait(x_barriers + stage * 8, ring.round & 1);
        ring.next();
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (int k = 0; k < STEPS; k++) multiply(part, fragments[0][k], x_here + k * 2, k > 0);
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        widen_weights(1, w_here);
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (int k = 0; k < STEPS; k++) multiply(part, fragments[1][k], x_next + k * 2, 1);
        asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 1;" ::: "memory");
        if (s + 1 < steps) begin_stage(s + 1);  // while the tensor cores multiply by the second half
        asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
        if (lane == 0) barrier_arrive(ring.empty + stage * 8);
#pragma unroll
        for (int i = 0; i < TOKENS / 2; i++) {
            asm volatile("" : "+f"(part[i])::"memory");
            sums[i] += part[i] * (i % 4 < 2 ? low : high);
        }
    }

    if constexpr (SPLIT > 1) exchange<TOKEN_GROUPS, OWN_TOKEN_GROUPS>(sums, place, data, arrived);
    else sync_multipliers();  // all have finished multiplying: the ring is free
    const u32 staged = data + EXCHANGE_BYTES;  // [OWN_TOKENS][PITCH] sums
#pragma unroll
    for (int i = 0; i < OWN_TOKEN_GROUPS * 4; i++) {
        const u32 to = staged + ((i / 4 * 8 + 2 * t + i % 2) * PITCH + tile_row + (i % 4 < 2 ? 0 : 8)) * 4;
        asm volatile("st.shared.f32 [%0], %1;" ::"r"(to), "f"(sums[i]) : "memory");
    }
    sync_multipliers();
    for (int item = warp; item / PIECES * 16 < OWN_TOKENS; item += MULTIPLIERS / 32) {
        const int token = item / PIECES * 16 + g, piece = item % PIECES;
        float v[TILE / 2];
#pragma unroll
        for (int i = 0; i < TILE / 4; i++) {  // pairs of columns: of groups, of gates before ups; of both rows of x
            const int column = i / 2 / GROUPS * BLOCK_OUTPUTS + piece * OUTPUTS + i / 2 % GROUPS * 8 + 2 * t;
            const u32 from = staged + ((token + i % 2 * 8) * PITCH + column) * 4;
            asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v[2 * i]), "=f"(v[2 * i + 1]) : "r"(from) : "memory");
        }
        if constexpr (SCALE) output.scale[0] = factors[token], output.scale[1] = factors[token + 8];
        output.store(v, nullptr, n_tile * PIECES + piece, n_tiles * PIECES, 0, before);
        before = take(item + MULTIPLIERS / 32);
    }
}
