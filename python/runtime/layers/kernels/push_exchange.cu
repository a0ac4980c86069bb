// Exchanges between the GPUs of one host, as one kernel each: every rank writes its part into the memory of others.
//
// Small values travel in packets of 16 bytes, {value, flag, value, flag}: a packet has arrived when both flags are those of this
// exchange, so there is neither a barrier nor a second trip. Eight bytes are always written as one. This is NCCL's protocol LL.
//
// Sums travel in tiles of 16 bytes per thread without flags: a word has arrived when it differs from EMPTY, which is never sent. The
// receiver makes the words that it has read EMPTY again. This is the Lamport protocol of TensorRT-LLM's all-reduce.
//
// There are two slots of packets and of tiles, used alternately. A rank that is one exchange ahead of another writes into the other slot.
// It cannot be two ahead: to finish exchange n + 1 it needs what the other rank sends in n + 1, which that rank only does after it has
// read (and emptied) everything of n.
//
// Needs: SIZE ranks, RANK, THREADS per block, EARLY (programmatic dependent launch), BFLOAT16, DEFER, KIND (of `reduce_add`).

const int ONE_SHOT = 0, TWO_SHOT = 1, SCATTERED = 2;

struct Ranks {
    u64 inbox[SIZE];  // where each rank receives, as addresses of this process: both slots of packets, then both slots of tiles
    int packets;      // of a sender in a slot
    int tiles;        // of a slot
    u64 timeout;      // ns until a rank that waits gives up; the launch fails then
};

const u32 LAST = 0xfffffffeu;        // the exchange after which counting restarts, at an odd number; flag 0 never occurs

__device__ __forceinline__ void begin() {
    if (EARLY) launch_next(), wait_for_previous();
}

__device__ __forceinline__ u32 exchange_number(const u32* state) {
    u32 number;
    asm volatile("ld.volatile.global.u32 %0, [%1];" : "=r"(number) : "l"(state) : "memory");
    return number;
}

// Count this exchange once all blocks are done with it: their threads have read their packets, so no fence is needed.
// state: [exchanges so far, blocks that are done].
__device__ __forceinline__ void end(u32* state, u32 number) {
    __syncthreads();
    if (threadIdx.x != 0) return;
    if (atomicAdd(state + 1, 1u) == gridDim.x - 1) {
        state[1] = 0;
        state[0] = number == LAST ? 1u : number + 1;
    }
}

// A wait for another rank.
struct Wait {
    u64 timeout, start = 0;
    u32 spins = 0;

    __device__ __forceinline__ Wait(const Ranks& ranks) : timeout(ranks.timeout) {}
    __device__ __forceinline__ void spin() {
        if (++spins % 65536 != 0) return;
        u64 now;
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
        if (start == 0) start = now;
        if (now - start > timeout) asm volatile("trap;");
    }
};

__device__ __forceinline__ u64 place(const Ranks& ranks, int receiver, int sender, u32 number, u64 packet) {
    return ranks.inbox[receiver] + (((number & 1) * SIZE + sender) * (u64)ranks.packets + packet) * 16;
}

__device__ __forceinline__ void send(u64 to, u32 a, u32 b, u32 flag) {
    asm volatile("st.volatile.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(a), "r"(flag), "r"(b), "r"(flag) : "memory");
}

__device__ __forceinline__ uint4 load_volatile(u64 from) {
    uint4 v;
    asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from) : "memory");
    return v;
}

// Wait for COUNT packets. All of them are loaded before a flag is read, so that this takes the time of one load if they have arrived.
template <int COUNT>
__device__ __forceinline__ void receive(const Ranks& ranks, const u64 (&from)[COUNT], u32 flag, u32 (&a)[COUNT], u32 (&b)[COUNT]) {
    for (Wait wait(ranks);; wait.spin()) {
        uint4 packets[COUNT];
#pragma unroll
        for (int i = 0; i < COUNT; i++) packets[i] = load_volatile(from[i]);
        bool arrived = true;
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            arrived = arrived && packets[i].y == flag && packets[i].w == flag;
            a[i] = packets[i].x, b[i] = packets[i].z;
        }
        if (arrived) return;
    }
}

// The i-th of the other ranks, from 0 on, counting up from RANK, and its inverse.
__device__ __forceinline__ constexpr int other(int i) { return (RANK + 1 + i) % SIZE; }
__device__ __forceinline__ constexpr int index_of(int rank) { return (rank - RANK - 1 + SIZE) % SIZE; }

__device__ __forceinline__ void widen(u32 pair, float& low, float& high) {
#if BFLOAT16
    low = __uint_as_float(pair << 16);
    high = __uint_as_float(pair & 0xffff0000u);
#else
    asm("{.reg .b16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h;}" : "=f"(low), "=f"(high) : "r"(pair));
#endif
}

__device__ __forceinline__ u32 narrow(float low, float high) {
#if BFLOAT16
    return to_bf16x2(low, high);
#else
    u32 pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
#endif
}

__device__ __forceinline__ void add(float (&sums)[8], uint4 values) {
    const u32 pairs[4] = {values.x, values.y, values.z, values.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float low, high;
        widen(pairs[i], low, high);
        sums[2 * i] += low;
        sums[2 * i + 1] += high;
    }
}

const u32 EMPTY = 0x80008000u;  // two negative zeros; positive ones are sent instead

__device__ __forceinline__ u64 tile_at(const Ranks& ranks, int receiver, u32 number, int tile) {
    const u64 first = 2 * SIZE * (u64)ranks.packets * 16, index = (number & 1) * (u64)ranks.tiles + tile;
    return ranks.inbox[receiver] + first + (index * THREADS + threadIdx.x) * 16;
}

__device__ __forceinline__ uint4 without_empty(uint4 v) {
    return make_uint4(v.x == EMPTY ? 0 : v.x, v.y == EMPTY ? 0 : v.y, v.z == EMPTY ? 0 : v.z, v.w == EMPTY ? 0 : v.w);
}

__device__ __forceinline__ void send_tile(u64 to, uint4 v) {
    asm volatile("st.volatile.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

// Wait for 16 bytes in each of COUNT places, and empty them.
template <int COUNT> __device__ __forceinline__ void receive_tiles(const Ranks& ranks, const u64 (&from)[COUNT], uint4 (&values)[COUNT]) {
    for (Wait wait(ranks);; wait.spin()) {
#pragma unroll
        for (int i = 0; i < COUNT; i++) values[i] = load_volatile(from[i]);
        bool arrived = true;
#pragma unroll
        for (int i = 0; i < COUNT; i++)
            arrived = arrived && values[i].x != EMPTY && values[i].y != EMPTY && values[i].z != EMPTY && values[i].w != EMPTY;
        if (arrived) break;
    }
#pragma unroll
    for (int i = 0; i < COUNT; i++) send_tile(from[i], make_uint4(EMPTY, EMPTY, EMPTY, EMPTY));
}

// The slot has a share for each sender. Send 16 bytes of a tile to another rank; receive those of all other ranks.
__device__ __forceinline__ void send_to(const Ranks& ranks, int receiver, u32 number, int share, int tile, uint4 v) {
    send_tile(tile_at(ranks, receiver, number, RANK * share + tile), v);
}
__device__ __forceinline__ void receive_from_all(const Ranks& ranks, u32 number, int share, int tile, uint4 (&values)[SIZE - 1]) {
    u64 from[SIZE - 1];
#pragma unroll
    for (int i = 0; i < SIZE - 1; i++) from[i] = tile_at(ranks, RANK, number, other(i) * share + tile);
    receive_tiles(ranks, from, values);
}

// sums += what all ranks have for 16 bytes of this tile, in rank order.
__device__ __forceinline__ void add_tiles(float (&sums)[8], const Ranks& ranks, u32 number, int share, int tile, uint4 own) {
    uint4 values[SIZE - 1];
    receive_from_all(ranks, number, share, tile, values);
#pragma unroll
    for (int rank = 0; rank < SIZE; rank++) {
        if (rank == RANK) add(sums, own);
        else add(sums, values[index_of(rank)]);
    }
}

__device__ __forceinline__ uint4 narrow_all(const float (&sums)[8]) {
    return make_uint4(narrow(sums[0], sums[1]), narrow(sums[2], sums[3]), narrow(sums[4], sums[5]), narrow(sums[6], sums[7]));
}

// The sum over all ranks of the values of a tile that this thread holds: the same bits on all ranks.
__device__ __forceinline__ void sum_over_ranks(float (&sums)[8], const Ranks& ranks, u32 number, int tile, uint4 own) {
    own = without_empty(own);
    if constexpr (KIND == ONE_SHOT) {
        const int share = ranks.tiles / SIZE;
#pragma unroll
        for (int i = 0; i < SIZE - 1; i++) send_to(ranks, other(i), number, share, tile, own);
        add_tiles(sums, ranks, number, share, tile, own);
        return;
    }
    // One rank adds up a tile, rounds the sums to 16 bits and sends them back. Half of a slot is for parts, the other half for sums.
    const int owner = tile % SIZE, share = ranks.tiles / 2 / SIZE, back = ranks.tiles / 2 + tile;
    uint4 total[1];
    if (owner == RANK) {
        add_tiles(sums, ranks, number, share, tile / SIZE, own);
        total[0] = without_empty(narrow_all(sums));
#pragma unroll
        for (int i = 0; i < SIZE - 1; i++) send_tile(tile_at(ranks, other(i), number, back), total[0]);
    } else {
        send_to(ranks, owner, number, share, tile / SIZE, own);
        const u64 from[1] = {tile_at(ranks, RANK, number, back)};
        receive_tiles(ranks, from, total);
    }
#pragma unroll
    for (int i = 0; i < 8; i++) sums[i] = 0.0f;
    add(sums, total[0]);
}

// Row `row` of this rank's rows of the sum of x [SIZE * rows, columns] over all ranks.
__device__ __forceinline__ void sum_of_row(
    float (&sums)[8], const Ranks& ranks, u32 number, const uint4* x, int vectors, int rows, int row, int vector
) {
    const int share = ranks.tiles / SIZE;
#pragma unroll
    for (int i = 0; i < SIZE - 1; i++)
        send_to(ranks, other(i), number, share, blockIdx.x, without_empty(x[((u64)other(i) * rows + row) * vectors + vector]));
    add_tiles(sums, ranks, number, share, blockIdx.x, x[((u64)RANK * rows + row) * vectors + vector]);
}

// h += the sum of x over all ranks. A block computes a tile: 8 * THREADS columns of one row, from row `first` on. With DEFER it also stores
// the inputs of the next norm: scaled = h * gain, and the block's sum of squares. If SCATTERED, x has `rows` rows for each rank, and this
// rank adds the sum of its own ones to the `live` rows of h; the remaining rows are padding.
extern "C" __global__ void __launch_bounds__(THREADS) reduce_add(
    const __grid_constant__ Ranks ranks, u32* state, const uint4* x, float4* h, const uint4* gain, uint4* scaled, float* squares,
    int columns, int chunks, int first, int rows, int live
) {
    begin();
    const int row = first + blockIdx.x / chunks, chunk = blockIdx.x % chunks, vector = chunk * THREADS + threadIdx.x;
    const u32 number = exchange_number(state);
    float square = 0.0f;
    if (vector * 8 < columns) {
        const u64 at = (u64)row * (columns / 8) + vector;
        float4 low = {}, high = {};
        if (row < live) low = h[2 * at], high = h[2 * at + 1];
        float sums[8] = {0, 0, 0, 0, 0, 0, 0, 0};
        if constexpr (KIND == SCATTERED) sum_of_row(sums, ranks, number, x, columns / 8, rows, row, vector);
        else sum_over_ranks(sums, ranks, number, blockIdx.x, x[at]);
        low.x += sums[0], low.y += sums[1], low.z += sums[2], low.w += sums[3];
        high.x += sums[4], high.y += sums[5], high.z += sums[6], high.w += sums[7];
        if (row < live) h[2 * at] = low, h[2 * at + 1] = high;
#if DEFER
        const uint4 g = gain[vector];
        const float values[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
        const u32 gains[4] = {g.x, g.y, g.z, g.w};
        u32 out[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float even, odd;
            widen(gains[i], even, odd);
            out[i] = to_bf16x2(values[2 * i] * even, values[2 * i + 1] * odd);
            square += values[2 * i] * values[2 * i] + values[2 * i + 1] * values[2 * i + 1];
        }
        if (row < live) scaled[at] = make_uint4(out[0], out[1], out[2], out[3]);
#endif
    }
#if DEFER
    __shared__ float of_warp[THREADS / 32];
    square = sum_of_lanes<32>(square);
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = square;
    __syncthreads();
    if (threadIdx.x == 0 && row < live) {
        float sum = 0.0f;
#pragma unroll
        for (int warp = 0; warp < THREADS / 32; warp++) sum += of_warp[warp];
        squares[(u64)row * chunks + chunk] = sum;
    }
#endif
    end(state, number);
}

// The rows of all ranks. Row r of rank i, `vectors` of 16 bytes, is stored from vector i * rank_stride + r * row_stride on. A block takes a
// tile of one row, from row `first` on.
extern "C" __global__ void __launch_bounds__(THREADS) gather(
    Ranks ranks, u32* state, const uint4* x, uint4* out, int vectors, int chunks, int first, u64 rank_stride, u64 row_stride
) {
    begin();
    const int row = first + blockIdx.x / chunks, vector = blockIdx.x % chunks * THREADS + threadIdx.x, share = ranks.tiles / SIZE;
    const u32 number = exchange_number(state);
    if (vector < vectors) {
        const uint4 own = without_empty(x[(u64)row * vectors + vector]);
#pragma unroll
        for (int i = 0; i < SIZE - 1; i++) send_to(ranks, other(i), number, share, blockIdx.x, own);
        out += row * row_stride + vector;
        out[RANK * rank_stride] = own;
        uint4 values[SIZE - 1];
        receive_from_all(ranks, number, share, blockIdx.x, values);
#pragma unroll
        for (int i = 0; i < SIZE - 1; i++) out[other(i) * rank_stride] = values[i];
    }
    end(state, number);
}

// This rank's rows of the sum of x [SIZE * rows, columns] over all ranks: out [rows, columns]. A block takes a tile of one row, from row
// `first` on.
extern "C" __global__ void __launch_bounds__(THREADS) scatter_sum(
    Ranks ranks, u32* state, const uint4* x, uint4* out, int vectors, int chunks, int rows, int first
) {
    begin();
    const int row = first + blockIdx.x / chunks, vector = blockIdx.x % chunks * THREADS + threadIdx.x;
    const u32 number = exchange_number(state);
    if (vector < vectors) {
        float sums[8] = {0, 0, 0, 0, 0, 0, 0, 0};
        sum_of_row(sums, ranks, number, x, vectors, rows, row, vector);
        out[(u64)row * vectors + vector] = narrow_all(sums);
    }
    end(state, number);
}

__device__ __forceinline__ float sum_of_squares(uint4 v) {
    const u32 pairs[4] = {v.x, v.y, v.z, v.w};
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float low, high;
        widen(pairs[i], low, high);
        sum += low * low + high * high;
    }
    return sum;
}

// RMS norms of the queries and of the keys of each row over all ranks, in place. A row has q_vectors vectors of 8 queries, k_vectors of keys, and
// others. A block computes one row. q_share and k_share: 1 / the columns of all ranks, by which the sums of squares become mean squares.
extern "C" __global__ void __launch_bounds__(THREADS) norm_rows(
    Ranks ranks, u32* state, uint4* rows, const uint4* q_gain, const uint4* k_gain, int vectors, int q_vectors, int k_vectors, float q_share,
    float k_share, float eps
) {
    begin();
    const u32 number = exchange_number(state), flag = number + 1;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    uint4* row = rows + (u64)blockIdx.x * vectors;
    float q = 0.0f, k = 0.0f;
    for (int i = threadIdx.x; i < q_vectors + k_vectors; i += THREADS) {
        const float sum = sum_of_squares(row[i]);
        if (i < q_vectors) q += sum;
        else k += sum;
    }
    __shared__ float2 of_warp[THREADS / 32], scales;
    q = sum_of_lanes<32>(q);
    k = sum_of_lanes<32>(k);
    if (lane == 0) of_warp[warp] = make_float2(q, k);
    __syncthreads();
    if (warp == 0) {
        q = k = 0.0f;
#pragma unroll
        for (int i = 0; i < THREADS / 32; i++) q += of_warp[i].x, k += of_warp[i].y;
        u32 a = __float_as_uint(q * q_share), b = __float_as_uint(k * k_share);
        // Lane i exchanges with rank i. All ranks add in the same order, so they get the same bits.
        u64 to = 0;
#pragma unroll
        for (int rank = 0; rank < SIZE; rank++)
            if (lane == rank && rank != RANK) to = place(ranks, rank, RANK, number, blockIdx.x);
        if (to) {
            send(to, a, b, flag);
            const u64 from[1] = {place(ranks, RANK, lane, number, blockIdx.x)};
            u32 x[1], y[1];
            receive(ranks, from, flag, x, y);
            a = x[0], b = y[0];
        }
        q = k = eps;
#pragma unroll
        for (int rank = 0; rank < SIZE; rank++) {
            q += __uint_as_float(__shfl_sync(0xffffffffu, a, rank));
            k += __uint_as_float(__shfl_sync(0xffffffffu, b, rank));
        }
        if (lane == 0) scales = make_float2(1.0f / sqrtf(q), 1.0f / sqrtf(k));
    }
    __syncthreads();
    for (int i = threadIdx.x; i < q_vectors + k_vectors; i += THREADS) {
        const float scale = i < q_vectors ? scales.x : scales.y;
        const uint4 v = row[i], g = i < q_vectors ? q_gain[i] : k_gain[i - q_vectors];
        const u32 values[4] = {v.x, v.y, v.z, v.w}, gains[4] = {g.x, g.y, g.z, g.w};
        u32 out[4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            float low, high, low_gain, high_gain;
            widen(values[j], low, high);
            widen(gains[j], low_gain, high_gain);
            out[j] = narrow(low * scale * low_gain, high * scale * high_gain);
        }
        row[i] = make_uint4(out[0], out[1], out[2], out[3]);
    }
    end(state, number);
}

// The argmax of each row over all ranks. Each rank sends its local argmax: the value logits[i, ids[i]] and the token ids[i] + first. If
// values are equal, the lowest rank wins; the first NaN wins over all numbers. With `hash`, *differs is set to 1 if another rank's
// hash differs.
extern "C" __global__ void __launch_bounds__(THREADS) largest(
    Ranks ranks, u32* state, const float* logits, const long long* ids, long long* tokens, const u64* hash, int* differs, int count,
    int stride, int first
) {
    begin();
    const u32 number = exchange_number(state), flag = number + 1;
    const int i = blockIdx.x * THREADS + threadIdx.x;
    if (i < count || (i == count && hash)) {
        u32 own_value, own_token;
        if (i < count) {
            const long long id = ids[i];
            own_value = __float_as_uint(logits[(u64)i * stride + id]);
            own_token = (u32)(id + first);
        } else {
            own_value = (u32)*hash;
            own_token = (u32)(*hash >> 32);
        }
        u64 from[SIZE - 1];
#pragma unroll
        for (int j = 0; j < SIZE - 1; j++) {
            send(place(ranks, other(j), RANK, number, i), own_value, own_token, flag);
            from[j] = place(ranks, RANK, other(j), number, i);
        }
        u32 values[SIZE - 1], sent[SIZE - 1];
        receive(ranks, from, flag, values, sent);
        float best = 0.0f;
        u32 chosen = 0;
#pragma unroll
        for (int rank = 0; rank < SIZE; rank++) {
            const u32 value = rank == RANK ? own_value : values[index_of(rank)], token = rank == RANK ? own_token : sent[index_of(rank)];
            if (i == count) {
                if (value != own_value || token != own_token) *differs = 1;
                continue;
            }
            const float score = __uint_as_float(value);
            if (rank == 0 || score > best || (score != score && best == best)) {
                best = score;
                chosen = token;
            }
        }
        if (i < count) tokens[i] = chosen;
    }
    end(state, number);
}

__device__ __forceinline__ u64 mixed(u64 x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return x ^ (x >> 31);
}

// Add to the 32-bit hash what a step committed: the first lens[i] of the `width` tokens of each of `rows` requests. One block.
extern "C" __global__ void __launch_bounds__(THREADS) commit(u64* hash, const long long* tokens, const int* lens, int rows, int width, int stride) {
    begin();
    __shared__ u64 total;
    if (threadIdx.x == 0) total = 0;
    __syncthreads();
    u64 sum = 0;
    for (int i = threadIdx.x; i < rows * width; i += THREADS) {
        const int row = i / width, column = i % width, length = lens[row];
        if (column < length) sum += mixed(mixed(tokens[(u64)row * stride + column] + 1) + ((u64)(i + 1) << 16) + length);
    }
    atomicAdd(&total, sum);
    __syncthreads();
    if (threadIdx.x == 0) *hash = mixed(*hash * 0x9e3779b97f4a7c15ull + total) & 0xffffffffull;
}
