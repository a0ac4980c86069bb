// The second GEMM of a sparse MLP for few tokens, with the sum over each token's experts:
// out[token] (+)= sum over its experts of weights of the down projection x h[pair], for the pairs that this process computed.
//
// A block computes 16 columns of `out` for all tokens. The columns of all experts hit, one expert after the other, are cut into stages, and
// the warps take neighbouring ones. A token that is not routed to a stage's expert is multiplied as zeros, which costs nothing. So each weight
// is read once, and nothing is left to be summed by another kernel.
//
// Constants from the host besides those of `fragments.cu`: TOP_K, WARPS, DEPTH, ADD, DEFER, FLOAT_OUT, BIAS.

constexpr int ROWS = 16, STAGE_COLUMNS = 64, STAGE_BYTES = ROWS * STAGE_COLUMNS * 2;
constexpr int TOKENS = 8, STRIDE = ROWS + 4, THREADS = 32 * WARPS;
constexpr int COUNT = TOKENS * ROWS;
static_assert(COUNT <= THREADS && TOKENS * STRIDE * 4 <= DEPTH * STAGE_BYTES, "a thread finishes one entry; sums take the place of stages");

__device__ __forceinline__ void copy16(u32 shared, const u16* global, bool in) {  // zeros if not `in`
    asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;" :: "r"(shared), "l"(global), "r"(in ? 16 : 0) : "memory");
}

// h: [T * TOP_K, inner] bfloat16, times the weights of the pairs. T * TOP_K <= 32.
extern "C" __global__ void __launch_bounds__(THREADS, 1) down_sums(
    const u16* h, Weights w, Routing routing, void* out, const u16* gain, u16* scaled, float* squares, int T
) {
    extern __shared__ __align__(128) u8 shared[];  // [WARPS][DEPTH] stages; then the sums of each warp
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int hidden = w.rows, inner = w.columns, first_row = blockIdx.x * ROWS, count = T * TOP_K;
    if (EARLY) asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    // As in the kernel before, every warp finds the experts by itself; that kernel lets this one start when the routing is known.
    const int id = lane < count ? routing.ids[lane] - routing.first : -1;
    const bool held = id >= 0 && id < routing.experts;
    const u32 alike = __match_any_sync(~0u, held ? id : -1);
    const u32 firsts = __ballot_sync(~0u, held && lane == __ffs(alike) - 1);  // the first pair of each expert
    const int per_expert = (inner + STAGE_COLUMNS - 1) / STAGE_COLUMNS, stages = __popc(firsts) * per_expert;
    const int share = (stages + WARPS - 1) / WARPS, begin = min(stages, warp * share), end = min(stages, begin + share);
    u8* const own = shared + warp * DEPTH * STAGE_BYTES;
    const u32 copied = (u32)__cvta_generic_to_shared(own) + lane / 8 * 128 + (lane % 8 ^ (lane / 8 & 1) * 4) * 16;
    const u16* const from = (const u16*)w.weight + (long)(first_row + lane / 8) * inner + lane % 8 * 8;

    // A place in the stages of this warp: experts still to come, and the next column.
    struct Place { u32 experts; int column; };
    const auto start_at = [&](int stage) {
        Place place = {firsts, stage % per_expert * STAGE_COLUMNS};
        for (int i = stage / per_expert; i > 0; i--) place.experts &= place.experts - 1;
        return place;
    };
    const auto go_on = [&](Place& place) {
        place.column += STAGE_COLUMNS;
        if (place.column >= inner) place.column = 0, place.experts &= place.experts - 1;
    };
    Place ahead = start_at(begin), here = ahead;
    int copies = begin, slot_ahead = 0;
    const auto copy_stage = [&]() {
        const int expert = __shfl_sync(~0u, id, (__ffs(ahead.experts) - 1) & 31);
        if (copies < end) {
            const u16* const at = from + (long)expert * hidden * inner + ahead.column;
            const bool in = ahead.column + lane % 8 * 8 < inner;
            #pragma unroll
            for (int j = 0; j < 4; j++) copy16(copied + slot_ahead * STAGE_BYTES + j * 512, in ? at + (long)j * 4 * inner : from, in);
            go_on(ahead);
            copies++;
        }
        slot_ahead = slot_ahead + 1 == DEPTH ? 0 : slot_ahead + 1;
        asm volatile("cp.async.commit_group;" ::: "memory");
    };
    #pragma unroll
    for (int i = 0; i < DEPTH - 1; i++) copy_stage();
    if (EARLY) asm volatile("griddepcontrol.wait;" ::: "memory");

    const int column_out = first_row + threadIdx.x % ROWS, token_out = threadIdx.x / ROWS;
    const bool finishes = threadIdx.x < COUNT && token_out < T;
    const long at_out = (long)token_out * hidden + column_out;
    float before = 0.0f;
    if (ADD && finishes) before = FLOAT_OUT ? ((const float*)out)[at_out] : of_bf16(((const u16*)out)[at_out]);
    if (BIAS && finishes) {
        for (int j = 0; j < TOP_K; j++) {
            const int expert = routing.ids[token_out * TOP_K + j] - routing.first;
            if (expert >= 0 && expert < routing.experts)
                before += routing.weights[token_out * TOP_K + j] * of_bf16(w.bias[(long)expert * hidden + column_out]);
        }
    }
    // This lane's columns of token g for the stage at `here`, zeros where the token is not routed there.
    const auto load_tokens = [&](uint4 (&pieces)[2]) {
        const int expert = __shfl_sync(~0u, id, (__ffs(here.experts) - 1) & 31);
        const u32 routed = __ballot_sync(~0u, held && id == expert);
        const u32 of_token = g * TOP_K < 32 ? routed >> g * TOP_K & (1u << TOP_K) - 1 : 0;
        const u16* const row = of_token == 0 ? nullptr : h + (long)(g * TOP_K + __ffs(of_token) - 1) * inner;
        #pragma unroll
        for (int c = 0; c < 2; c++) {
            const int column = here.column + 32 * c + 8 * t;
            pieces[c] = piece_of(column < inner ? row : nullptr, column);
        }
        go_on(here);
    };
    const u8* const low = own + g * 128 + (t ^ (g & 1) * 4) * 16;
    const int other_half = (g & 1) ? -64 : 64;  // from a row's first 32 columns to its second
    float sums[4] = {};
    int slot = 0;
    uint4 tokens[2], next_tokens[2];
    if (begin < end) load_tokens(next_tokens);
    for (int stage = begin; stage < end; stage++) {
        tokens[0] = next_tokens[0], tokens[1] = next_tokens[1];
        if (stage + 1 < end) load_tokens(next_tokens);
        asm volatile("cp.async.wait_group %0;" :: "n"(DEPTH - 2) : "memory");
        __syncwarp();
        copy_stage();  // over the stage before this one, which all lanes have read
        #pragma unroll
        for (int c = 0; c < 2; c++) {
            const u8* const from_here = low + slot * STAGE_BYTES + c * other_half;
            const uint4 a = *(const uint4*)from_here, b = *(const uint4*)(from_here + 1024);
            mma(sums, a.x, b.x, a.y, b.y, tokens[c].x, tokens[c].y);
            mma(sums, a.z, b.z, a.w, b.w, tokens[c].z, tokens[c].w);
        }
        slot = slot + 1 == DEPTH ? 0 : slot + 1;
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncwarp();
    float* const kept = (float*)own + 2 * t * STRIDE + g;
    kept[0] = sums[0], kept[STRIDE] = sums[1];
    kept[8] = sums[2], kept[STRIDE + 8] = sums[3];
    __syncthreads();
    if (threadIdx.x >= COUNT) return;  // whole warps
    float sum = 0.0f;
    #pragma unroll
    for (int other = 0; other < WARPS; other++) sum += ((const float*)(shared + other * DEPTH * STAGE_BYTES))[token_out * STRIDE + threadIdx.x % ROWS];
    sum += before;
    if (finishes && FLOAT_OUT) ((float*)out)[at_out] = sum;
    if (finishes && !FLOAT_OUT) ((u16*)out)[at_out] = to_bf16(sum);
    if (DEFER) {
        float square = sum * sum;
        #pragma unroll
        for (int apart = ROWS / 2; apart > 0; apart /= 2) square += __shfl_xor_sync(~0u, square, apart);
        if (finishes) {
            scaled[at_out] = to_bf16(sum * of_bf16(gain[column_out]));
            if (threadIdx.x % ROWS == 0) squares[at_out / ROWS] = square;
        }
    }
}
