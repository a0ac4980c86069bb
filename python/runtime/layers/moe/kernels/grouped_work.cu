// What blocks of the grouped GEMMs work on: items, each a tile of pairs of an expert by a tile of its weights.
//
// With CLUSTER_M = 2, the two blocks of a cluster take neighbouring tiles of pairs of an expert and load half of the weights for both. Of
// an odd number of tiles, they take the last one by neighbouring tiles of weights instead. Either takes as long: a tile in the table
// stands for as many items of work as half of the tiles of weights. Items follow each other by expert, and clusters take every so many
// of them, so that blocks that run at the same time share weights and rows of x in L2.
//
// With CLAIM, clusters claim their items one by one, because an item with pairs for one warpgroup alone takes half of the time. Two tiles
// whose pairs are those of three warpgroups are then taken one after the other: together, one block would wait for the other.
//
// Defined before this text: ROWS, CLUSTER_M, STAGES, GATED, CLAIM; gemm/wgmma_parts.cu.

// align.py: the sorted pairs; `counters`: tiles that hold pairs, then the items that were claimed of either GEMM.
struct Tiles { const int *pairs, *experts, *places; int* counters; };

// What the table says of a tile: its expert, the tiles of that before it, and the pairs of that from here on.
struct Entry { int expert, before, left; };
// A tile of pairs, of which `rows` are real, and a tile of weights, which may lie past the last one. `shared`: with the other block.
struct Item { int expert, tile, column, rows; bool shared; };

struct Work {
    Tiles tiles;
    int each, count, block;  // items of a tile of the table; all of them; of this block in its cluster

    __device__ __forceinline__ Work(const Tiles& tiles, int n_tiles) : tiles(tiles), block(blockIdx.x % CLUSTER_M) {
        each = (n_tiles + CLUSTER_M - 1) / CLUSTER_M;
        count = *tiles.counters * each;
    }
    __device__ __forceinline__ Entry entry(int i) const {
        if (i >= count) return {0, 0, 0};
        const int tile = i / each;
        const int2 place = *(const int2*)(tiles.places + 2 * tile);
        return {tiles.experts[tile], place.x, place.y};
    }
    __device__ __forceinline__ Item item(int i, const Entry& e) const {
        const int tile = i / each, column = i % each;
        if constexpr (CLUSTER_M == 1) return {e.expert, tile, column, min(e.left, ROWS), false};
        const int second = e.before & 1;
        if constexpr (CLAIM) {
            if (e.left <= (1 - second) * ROWS + 64) return {e.expert, tile, column * 2 + block, min(e.left, ROWS), false};
        }
        if (!second && e.left <= ROWS) return {e.expert, tile, column * 2 + block, e.left, false};
        return {e.expert, tile - second + block, second * each + column, min(e.left + (second - block) * ROWS, ROWS), true};
    }
    // The next item that no cluster has.
    __device__ __forceinline__ int claim() const { return gridDim.x / CLUSTER_M + atomicAdd(tiles.counters + (GATED ? 1 : 2), 1); }
};

// As `barrier_wait`, for what other blocks of the cluster have written.
__device__ __forceinline__ void wait_for_cluster(u32 barrier, u32 parity) {
    asm volatile(
        "{\n.reg .pred done;\nAGAIN:\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n@!done bra AGAIN;\n}"
        ::"r"(barrier), "r"(parity) : "memory");
}

// An item's number, and what the table says of its tile.
struct Claim { int index; Entry entry; };

// The claims of a cluster, on their way from its first block to all of them. No barrier says that a place is free again: its readers have
// read it before they release or fill a stage of its item, and the sender has waited for such a stage, because items of all places together
// have more than STAGES steps.
struct Queue {
    static constexpr int PLACES = STAGES + 1, BYTES = sizeof(Claim);
    u32 claims, full;
    int place = 0;
    u32 round = 0;

    __device__ __forceinline__ Queue(u32 data) : claims(data), full(data + PLACES * BYTES) {}
    __device__ __forceinline__ void init() const {
        for (int p = 0; p < PLACES; p++) barrier_init(full + p * 8, 1);
    }
    // One thread of each block expects the next claim.
    __device__ __forceinline__ void expect() const { barrier_expect(full + place * 8, BYTES); }
    // The thread that claims calls this in each step of the item before. It claims late, because others may begin the item sooner, but some
    // steps before the last one, because the counter and the table take time.
    __device__ __forceinline__ void claim(Claim& next, int s, int steps, const Work& work) const {
        if (s == max(steps - 5, 0)) next.index = work.claim();
        if (s == max(steps - 3, 0)) next.entry = work.entry(next.index);
        if (s < steps - 1) return;
        const Entry& entry = next.entry;
        const float4 words = {
            __int_as_float(next.index), __int_as_float(entry.expert), __int_as_float(entry.before), __int_as_float(entry.left)
        };
        for (int block = 0; block < CLUSTER_M; block++) send(block, claims + place * BYTES, full + place * 8, words);
    }
    __device__ __forceinline__ Claim take() {
        wait_for_cluster(full + place * 8, round & 1);
        Claim claim;
        asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(claim.index), "=r"(claim.entry.expert), "=r"(claim.entry.before), "=r"(claim.entry.left)
                     : "r"(claims + place * BYTES)
                     : "memory");
        if (++place == PLACES) place = 0, round++;
        return claim;
    }
};
