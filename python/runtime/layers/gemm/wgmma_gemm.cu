// out = epilogue(x @ w.T) (epilogue.py) for few rows of x and a large weight, which is read once.
//
// One thread issues TMA loads of boxes of 64 columns of x and of w into a ring of stages; one or two warpgroups multiply what has arrived
// (wgmma: x is the left operand, w the right one) and run the epilogue. Weights depend on nothing, so the ring is filled with them
// while the previous kernel still runs (programmatic dependent launch); loads of x wait for that kernel to end.
//
// SPLIT blocks, a cluster, share the columns of one tile; their sums meet in shared memory and are added in order.
//
// Sources: PTX ISA, "wgmma", "cp.async.bulk.tensor", "mbarrier", "griddepcontrol", "barrier.cluster".
//
// A norm around the GEMM takes no kernel (deferred_norm.py): with SCALE, rows of sums are divided by their root mean square; with DEFER,
// the new stream is also stored times the gain of the next norm, with the sums of its squares.
//
// Defined before this text: ROWS (64 or 128, rows that are computed), TILE (rows of w), SPLIT, MOST_STAGES, BFLOAT16, BIAS, EARLY, WRITE,
// ARGMAX, STORE, SCALE, DEFER; and multiply(), the one instruction whose operands depend on TILE.

// WRITE: store in 16 bits; silu(gate) * up; add to float32; store float32; gelu(gate) * up
constexpr int NARROW = 0, SILU = 1, ADD = 2, FLOAT = 3, GELU = 4;
constexpr bool GATED = WRITE == SILU || WRITE == GELU;
constexpr int COLUMNS = 64;                              // of a box: rows of 128 bytes, as the swizzle wants them
constexpr int ROW_BYTES = COLUMNS * 2;
constexpr int MULTIPLIERS = ROWS / 64 * 128;  // threads
constexpr int W_BYTES = TILE * ROW_BYTES;
constexpr int OUTPUTS = GATED ? TILE / 2 : TILE;
constexpr int GROUPS = OUTPUTS / 8;  // of 8 columns: a thread has two neighbours of each, in two rows
constexpr int OWN_GROUPS = GROUPS / SPLIT;
constexpr int NO_COLUMN = 0x7FFFFFFF;
// L2 policies. Weights leave first, unless float32 results come in their place as fast as they go.
constexpr u64 EVICT_FIRST = 0x12F0000000000000ull, EVICT_NORMAL = 0x1000000000000000ull, EVICT_LAST = 0x14F0000000000000ull;
constexpr u64 W_POLICY = WRITE == FLOAT ? EVICT_NORMAL : EVICT_FIRST;

struct alignas(64) TensorMap { char bytes[128]; };

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void barrier_init(u32 barrier, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

__device__ __forceinline__ void barrier_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void barrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
    asm volatile(
        "{\n.reg .pred done;\nAGAIN:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra AGAIN;\n}" ::"r"(barrier), "r"(parity)
        : "memory");
}

// A barrier of all threads of the cluster; with `memory`, writes before it are visible to all after it.
template <bool memory>
__device__ __forceinline__ void cluster_sync() {
    if constexpr (memory) asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
    else asm volatile("barrier.cluster.arrive.relaxed;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

__device__ __forceinline__ void launch_next() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
__device__ __forceinline__ void wait_for_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

__device__ __forceinline__ void load_box(u32 to, const TensorMap* map, u32 barrier, int column, int row, u64 policy) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(to),
        "l"(map), "r"(barrier), "r"(column), "r"(row), "l"(policy)
        : "memory");
}

// Stages in shared memory, used round robin. A stage is full when its bytes have arrived, empty when every multiplying warp has read it.
struct Ring {
    u32 data, full, empty, stage_bytes;
    int stages, stage = 0;
    u32 round = 0;

    __device__ __forceinline__ Ring(u32 data, u32 barriers, u32 stage_bytes, int stages)
        : data(data), full(barriers), empty(barriers + stages * 8), stage_bytes(stage_bytes), stages(stages) {}
    __device__ __forceinline__ void init() const {
        for (int s = 0; s < stages; s++) barrier_init(full + s * 8, 1), barrier_init(empty + s * 8, MULTIPLIERS / 32);
    }
    __device__ __forceinline__ u32 here() const { return data + stage * stage_bytes; }
    __device__ __forceinline__ u32 full_here() const { return full + stage * 8; }
    __device__ __forceinline__ u32 empty_here() const { return empty + stage * 8; }
    __device__ __forceinline__ void wait_full() const { barrier_wait(full_here(), round & 1); }
    __device__ __forceinline__ void wait_empty() const {
        if (round > 0) barrier_wait(empty_here(), (round - 1) & 1);
    }
    __device__ __forceinline__ void next() {
        if (++stage == stages) stage = 0, round++;
    }
};

// A tile of rows of 128 bytes, swizzled by 128: 8 rows are 1024 bytes.
__device__ __forceinline__ u64 descriptor(u32 address) {
    return (u64)((address & 0x3FFFF) >> 4) | (1ull << 16) | (64ull << 32) | (1ull << 62);
}

__device__ __forceinline__ float widen(u16 x) {
    if constexpr (BFLOAT16) return __uint_as_float((u32)x << 16);
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
    return y;
}

__device__ __forceinline__ u32 narrow(float low, float high) {
    u32 both;
    if constexpr (BFLOAT16) asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    else asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}

// x * sigmoid(x), or for gelu in its tanh form x * sigmoid(sqrt(8 / pi) * (x + 0.044715 x ** 3)).
__device__ __forceinline__ float activate(float x) {
    const float slope = WRITE == GELU ? 1.5957691216057308f * (x + 0.044715f * x * x * x) : x;
    return x / (1.0f + __expf(-slope));
}

// The largest entry so far and its column, in the order of kernels/argmax_reduce.py: the first of equals, NaN above all.
struct Largest {
    float value = 0.0f;
    int column = NO_COLUMN;

    __device__ __forceinline__ void see(float x, int at) {
        if (x > value || (x != x && value == value) || column == NO_COLUMN) value = x, column = at;
    }
    __device__ __forceinline__ int key() const {
        if (column == NO_COLUMN) return -0x7FFFFFFF - 1;
        if (value != value) return 0x7FFFFFFF;
        if (value == 0.0f) return 0;
        const int bits = __float_as_int(value);
        return bits < 0 ? bits ^ 0x7FFFFFFF : bits;
    }
};

// deferred_norm.py: what is read for the norm before this GEMM, and written for the norm after it.
struct Norms {
    const float* squares;
    int parts;
    float eps;
    const u16* gain;
    u16* scaled;
    float* next_squares;
};

// Where a thread's results go: `row` and `row` + 8, two columns from `column` on in each group of 8.
struct Output {
    void* out;
    const u16* bias;
    Norms norms;
    int rows, columns, row, column;
    float scale[2] = {1.0f, 1.0f}, squares[2] = {0.0f, 0.0f};

    // `scale` of the two rows; four lanes share a row.
    __device__ __forceinline__ void find_scale(int width) {
        const int lane = threadIdx.x % 4;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float sum = 0.0f;
            if (row + half * 8 < rows) {
                const float* at = norms.squares + (long)(row + half * 8) * norms.parts;
                if (norms.parts % 4 == 0) {
#pragma unroll 8
                    for (int i = lane * 4; i < norms.parts; i += 16) {
                        const float4 four = *(const float4*)(at + i);
                        sum += (four.x + four.y) + (four.z + four.w);
                    }
                } else {
                    for (int i = lane; i < norms.parts; i += 4) sum += at[i];
                }
            }
            sum += __shfl_xor_sync(0xFFFFFFFF, sum, 1);
            sum += __shfl_xor_sync(0xFFFFFFFF, sum, 2);
            scale[half] = rsqrtf(sum / width + norms.eps);
        }
    }
    __device__ __forceinline__ void apply_scale(float* v) const {
        if constexpr (SCALE) v[0] *= scale[0], v[1] *= scale[0], v[2] *= scale[1], v[3] *= scale[1];
    }
    // Store the sums of squares of this thread's rows as column `part` of `parts`.
    __device__ __forceinline__ void store_squares(int part, int parts) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float sum = squares[half];
            sum += __shfl_xor_sync(0xFFFFFFFF, sum, 1);
            sum += __shfl_xor_sync(0xFFFFFFFF, sum, 2);
            if (threadIdx.x % 4 == 0 && row + half * 8 < rows) norms.next_squares[(long)(row + half * 8) * parts + part] = sum;
            squares[half] = 0.0f;
        }
    }

    // The sums of one group: two columns of `row`, then the same columns of `row` + 8.
    __device__ __forceinline__ void add_bias(float* v, int group, int offset) const {
        const int at = column + group * 8;
        if (!BIAS || at >= columns) return;
        const float a = widen(bias[offset + at]), b = widen(bias[offset + at + 1]);
        v[0] += a, v[1] += b, v[2] += a, v[3] += b;
    }
    __device__ __forceinline__ void store_floats(const float* v, int group) {
        const int at = column + group * 8;
        if (at >= columns) return;
        float gain[2];
        if constexpr (DEFER) gain[0] = widen(norms.gain[at]), gain[1] = widen(norms.gain[at + 1]);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            if (row + half * 8 >= rows) continue;
            float2* to = (float2*)((float*)out + (long)(row + half * 8) * columns + at);
            float2 sum = make_float2(v[half * 2], v[half * 2 + 1]);
            if constexpr (WRITE == ADD) {
                const float2 old = *to;
                sum.x += old.x, sum.y += old.y;
            }
            *to = sum;
            if constexpr (DEFER) {
                *(u32*)(norms.scaled + (long)(row + half * 8) * columns + at) = narrow(sum.x * gain[0], sum.y * gain[1]);
                squares[half] += sum.x * sum.x + sum.y * sum.y;
            }
        }
    }
    __device__ __forceinline__ void store_narrow(const float* v, int group) const {
        const int at = column + group * 8;
        if (at >= columns) return;
        u16* to = (u16*)out + (long)row * columns + at;
        if (row < rows) *(u32*)to = narrow(v[0], v[1]);
        if (row + 8 < rows) *(u32*)(to + 8l * columns) = narrow(v[2], v[3]);
    }
};

extern "C" __global__ void __launch_bounds__(MULTIPLIERS + 32, 1)
wgmma_gemm(const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap w_map, void* out, int* partial, const u16* bias, Norms norms,
              int rows, int columns, int width, int x_rows, int stages) {
    extern __shared__ char unaligned[];
    __shared__ u64 barriers[2 * MOST_STAGES];
    const u32 data = (shared_address(unaligned) + 1023) & ~1023u;
    // A stage is a box of x, then one of w. Fewer rows of x are loaded than are computed: the others hold arbitrary data, and their
    // results are not stored.
    const u32 x_bytes = x_rows * ROW_BYTES;
    Ring ring(data, shared_address(barriers), x_bytes + W_BYTES, stages);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int part = blockIdx.x % SPLIT;
    const int tiles = (columns + OUTPUTS - 1) / OUTPUTS;
    const int first_tile = blockIdx.x / SPLIT, tile_step = gridDim.x / SPLIT;
    const int k_boxes = (width + COLUMNS - 1) / COLUMNS;
    const int k_each = (k_boxes + SPLIT - 1) / SPLIT, k_first = part * k_each;
    const int steps = max(min(k_each, k_boxes - k_first), 0);
    if constexpr (EARLY) launch_next();
    if (threadIdx.x == 0) {
        ring.init();
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();

    if (warp == MULTIPLIERS / 32) {
        if (lane == 0) {
            auto load_x = [&](int s) { load_box(ring.here(), &x_map, ring.full_here(), (k_first + s) * COLUMNS, 0, EVICT_LAST); };
            auto load_w = [&](int tile, int s) {
                const int k = (k_first + s) * COLUMNS;
                barrier_expect(ring.full_here(), x_bytes + W_BYTES);
                load_box(ring.here() + x_bytes, &w_map, ring.full_here(), k, tile * OUTPUTS, W_POLICY);
                if constexpr (GATED) {  // the matching up rows
                    load_box(ring.here() + x_bytes + W_BYTES / 2, &w_map, ring.full_here(), k, columns + tile * OUTPUTS, W_POLICY);
                }
            };
            const int prefill = min(steps, stages);
            const Ring start = ring;
            for (int s = 0; s < prefill; s++, ring.next()) load_w(first_tile, s);
            wait_for_previous();
            ring = start;
            for (int s = 0; s < prefill; s++, ring.next()) load_x(s);
            for (int tile = first_tile; tile < tiles; tile += tile_step) {
                for (int s = tile == first_tile ? prefill : 0; s < steps; s++, ring.next()) {
                    ring.wait_empty();
                    load_w(tile, s);
                    load_x(s);
                }
            }
        }
        if constexpr (SPLIT > 1) cluster_sync<false>(), cluster_sync<true>();
        return;
    }

    const int group = warp / 4;
    Output output = {out, bias, norms, rows, columns, group * 64 + warp % 4 * 16 + lane / 4, 0};
    wait_for_previous();
    if constexpr (SCALE) output.find_scale(width);
    for (int tile = first_tile; tile < tiles; tile += tile_step) {
        float sums[TILE / 2];
#pragma unroll
        for (int i = 0; i < TILE / 2; i++) sums[i] = 0.0f;
        u32 before = 0;
        for (int s = 0; s < steps; s++, ring.next()) {
            ring.wait_full();
            const u64 x_here = descriptor(ring.here() + group * 64 * ROW_BYTES), w_here = descriptor(ring.here() + x_bytes);
            asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
            for (int k = 0; k < COLUMNS / 16; k++) multiply(sums, x_here + k * 2, w_here + k * 2);
            asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 1;" ::: "memory");
            if (s > 0 && lane == 0) barrier_arrive(before);
            before = ring.empty_here();
        }
        asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
        for (int i = 0; i < TILE / 2; i++) asm volatile("" : "+f"(sums[i])::"memory");
        if (steps > 0 && lane == 0) barrier_arrive(before);

        output.column = tile * OUTPUTS + lane % 4 * 2;
        if constexpr (SPLIT > 1) {
            cluster_sync<false>();  // all blocks have finished multiplying: the ring is free
#pragma unroll
            for (int to = 0; to < SPLIT; to++) {
                u32 there;
                asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(data), "r"(to));
#pragma unroll
                for (int i = 0; i < OWN_GROUPS; i++) {
                    const float* v = sums + (to * OWN_GROUPS + i) * 4;
                    asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(there + ((part * OWN_GROUPS + i) * MULTIPLIERS + threadIdx.x) * 16),
                                 "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3])
                                 : "memory");
                }
            }
            cluster_sync<true>();
#pragma unroll
            for (int i = 0; i < OWN_GROUPS; i++) {
                float v[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
                for (int from = 0; from < SPLIT; from++) {
                    float a, b, c, d;
                    asm volatile("ld.shared::cta.v4.f32 {%0, %1, %2, %3}, [%4];"
                                 : "=f"(a), "=f"(b), "=f"(c), "=f"(d)
                                 : "r"(data + ((from * OWN_GROUPS + i) * MULTIPLIERS + threadIdx.x) * 16)
                                 : "memory");
                    v[0] += a, v[1] += b, v[2] += c, v[3] += d;
                }
                const int at = part * OWN_GROUPS + i;
                output.apply_scale(v);
                output.add_bias(v, at, 0);
                if constexpr (WRITE == NARROW) output.store_narrow(v, at);
                else output.store_floats(v, at);
            }
            if constexpr (DEFER) output.store_squares(tile * SPLIT + part, tiles * SPLIT);
        } else if constexpr (WRITE == NARROW || GATED) {
#pragma unroll
            for (int i = 0; i < GROUPS; i++) {
                float* v = sums + i * 4;
                output.apply_scale(v);
                output.add_bias(v, i, 0);
                if constexpr (GATED) {
                    float* up = sums + (GROUPS + i) * 4;
                    output.apply_scale(up);
                    output.add_bias(up, i, columns);
#pragma unroll
                    for (int j = 0; j < 4; j++) v[j] = activate(v[j]) * up[j];
                }
                output.store_narrow(v, i);
            }
        } else {
            Largest top[2];
#pragma unroll
            for (int i = 0; i < GROUPS; i++) {
                float* v = sums + i * 4;
                output.apply_scale(v);
                output.add_bias(v, i, 0);
                if constexpr (STORE) output.store_floats(v, i);
                const int at = output.column + i * 8;
                if (ARGMAX && at < columns) {
                    top[0].see(v[0], at), top[0].see(v[1], at + 1);
                    top[1].see(v[2], at), top[1].see(v[3], at + 1);
                }
            }
            if constexpr (DEFER) output.store_squares(tile, tiles);
            if constexpr (ARGMAX) {
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    int key = top[half].key(), at = top[half].column;
#pragma unroll
                    for (int step = 1; step < 4; step *= 2) {
                        const int other_key = __shfl_xor_sync(0xFFFFFFFF, key, step), other_at = __shfl_xor_sync(0xFFFFFFFF, at, step);
                        if (other_key > key || (other_key == key && other_at < at)) key = other_key, at = other_at;
                    }
                    const int row = output.row + half * 8;
                    if (lane % 4 == 0 && row < rows) {
                        partial[(long)row * tiles + tile] = key;
                        partial[(long)(rows + row) * tiles + tile] = at;
                    }
                }
            }
        }
    }
}
