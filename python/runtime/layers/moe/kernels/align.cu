// Sort pairs of token and expert by expert, in whole tiles: one cluster of blocks, stable, and the same whatever order threads run in.
//
// Blocks, and warps of a block, take runs of pairs in their order. Each warp counts its pairs by expert. Sums of the counts over warps and
// blocks give the place of each warp's first pair of each expert, from where the warp places its pairs, 32 at a time.
//
// Defined before this text: EXPERTS (at most THREADS), BLOCKS (of the cluster), WARPS (of a block, at most 32), EARLY.

constexpr int THREADS = WARPS * 32;
constexpr int BATCH = 8;  // times 32 ids of a warp that are on their way at once

// align.py: the results.
struct Sorted { int *pairs, *experts, *places, *used; };

// Load the word at the same shared-memory address in block `rank` of the cluster.
__device__ __forceinline__ int load_from(int rank, const int* here) {
    int value;
    asm volatile("ld.shared::cluster.s32 %0, [%1];" : "=r"(value) : "r"(address_in(shared_address(here), rank)) : "memory");
    return value;
}

// The experts of a lane's pairs among those from `i` on and before `end`; -1 where it is none of this process.
__device__ __forceinline__ void load_experts(int (&experts)[BATCH], const int* ids, int i, int end, int first) {
#pragma unroll
    for (int b = 0; b < BATCH; b++) {
        const int at = i + b * 32 + threadIdx.x % 32;
        const int expert = at < end ? ids[at] - first : -1;
        experts[b] = (u32)expert < EXPERTS ? expert : -1;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) align_pairs(const int* ids, const Sorted sorted, int count, int first, int rows) {
    extern __shared__ int shared[];  // [WARPS, EXPERTS]: how many pairs a warp has of an expert, then the place of the next one
    __shared__ int in_block[EXPERTS], in_all[EXPERTS], first_tiles[EXPERTS], starts[EXPERTS], sums[WARPS];
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, block = blockIdx.x;
    volatile int* own = shared + warp * EXPERTS;
    const int rounds = (count + BLOCKS * THREADS - 1) / (BLOCKS * THREADS);
    const int begin = (block * WARPS + warp) * rounds * 32, end = min(begin + rounds * 32, count);
    int experts[BATCH];
    if constexpr (EARLY) launch_next();
    for (int i = thread; i < WARPS * EXPERTS; i += THREADS) shared[i] = 0;
    __syncthreads();
    wait_for_previous();

    for (int i = begin; i < end; i += BATCH * 32) {
        load_experts(experts, ids, i, end, first);
#pragma unroll
        for (int b = 0; b < BATCH; b++)
            if (experts[b] >= 0) atomicAdd(shared + warp * EXPERTS + experts[b], 1);
    }
    __syncthreads();
    if (thread < EXPERTS) {
        int sum = 0;
#pragma unroll 8
        for (int w = 0; w < WARPS; w++) {
            const int here = shared[w * EXPERTS + thread];
            shared[w * EXPERTS + thread] = sum;
            sum += here;
        }
        in_block[thread] = sum;
    }
    cluster_arrive<true>(), cluster_wait();
    int all = 0, before = 0;
    if (thread < EXPERTS) {
#pragma unroll
        for (int b = 0; b < BLOCKS; b++) {
            const int there = load_from(b, in_block + thread);
            all += there;
            before += b < block ? there : 0;
        }
    }
    cluster_arrive<true>();  // this block has read the others' counts: they may exit

    const int tiles = (all + rows - 1) / rows;
    int tiles_end = tiles;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
        const int other = __shfl_up_sync(~0u, tiles_end, distance);
        if (lane >= distance) tiles_end += other;
    }
    if (lane == 31) sums[warp] = tiles_end;
    __syncthreads();
    for (int w = 0; w < warp; w++) tiles_end += sums[w];
    if (thread < EXPERTS) {
        in_all[thread] = all, first_tiles[thread] = tiles_end - tiles;
        starts[thread] = (tiles_end - tiles) * rows + before;
    }
    if (block == 0 && thread == EXPERTS - 1) *sorted.used = tiles_end;
    __syncthreads();
    for (int i = thread; i < WARPS * EXPERTS; i += THREADS) shared[i] += starts[i % EXPERTS];
    __syncthreads();

    for (int i = begin; i < end; i += BATCH * 32) {
        load_experts(experts, ids, i, end, first);
#pragma unroll
        for (int b = 0; b < BATCH; b++) {
            const u32 same = __match_any_sync(~0u, experts[b]);
            const int earlier = __popc(same & ((1u << lane) - 1));
            const bool held = experts[b] >= 0;
            const int place = held ? own[experts[b]] : 0;
            __syncwarp();
            if (held && earlier == 0) own[experts[b]] = place + __popc(same);
            __syncwarp();
            if (held) sorted.pairs[place + earlier] = i + b * 32 + lane;
        }
    }
    for (int expert = warp * BLOCKS + block; expert < EXPERTS; expert += WARPS * BLOCKS) {
        const int size = in_all[expert], tile = first_tiles[expert], filled = (size + rows - 1) / rows;
        for (int i = size + lane; i < filled * rows; i += 32) sorted.pairs[tile * rows + i] = count;
        for (int i = lane; i < filled; i += 32) {
            sorted.experts[tile + i] = expert;
            *(int2*)(sorted.places + (tile + i) * 2) = make_int2(i, size - i * rows);
        }
    }
    cluster_wait();  // the block must not exit before the other blocks have read its counts
}
