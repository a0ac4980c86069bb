// Shared by all CUDA C++ kernels: short type names, and functions that wrap single PTX instructions.
//
// A program's constants are defined after this text, so nothing here depends on them. Addresses of type u32 are shared-memory addresses.
//
// Source: PTX ISA; each comment begins with the name of the instruction.

typedef unsigned char u8; typedef unsigned short u16; typedef unsigned int u32; typedef unsigned long long u64;

// cvta.to.shared.
__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// griddepcontrol: launch_dependents allows the dependent kernel to launch; wait blocks until the preceding kernel has completed and its writes are
// visible.
__device__ __forceinline__ void launch_next() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
__device__ __forceinline__ void wait_for_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// %cluster_nctarank, %clusterid.x, %cluster_ctarank: blocks of a cluster, its number, and a block's number in it.
__device__ __forceinline__ u32 cluster_size() { u32 n; asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(n)); return n; }
__device__ __forceinline__ u32 cluster_id() { u32 n; asm("mov.u32 %0, %%clusterid.x;" : "=r"(n)); return n; }
__device__ __forceinline__ u32 cluster_rank() { u32 n; asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(n)); return n; }

// barrier.cluster: every thread of the cluster arrives and waits. With RELEASE, writes before the arrival are visible to all blocks after the wait.
template <bool RELEASE = false> __device__ __forceinline__ void cluster_arrive() {
    if constexpr (RELEASE) asm volatile("barrier.cluster.arrive.release;" ::: "memory");
    else asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }

// mapa: the same address in the shared memory of block `rank` of the cluster.
__device__ __forceinline__ u32 address_in(u32 address, u32 rank) {
    u32 there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
    return there;
}

// st.async: stores to shared memory of a block of the cluster, and counts the bytes at an mbarrier of that block. Without `block` the addresses come
// from `address_in`; with `block` they are addresses in this block, which the function maps to that block.
__device__ __forceinline__ void send(u32 there, u32 barrier, float x, float y) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];"
        :: "r"(there), "f"(x), "f"(y), "r"(barrier) : "memory");
}
__device__ __forceinline__ void send(int block, u32 here, u32 barrier, float4 v) {
    asm volatile(
        "{\n.reg .u32 there, counter;\nmapa.shared::cluster.u32 there, %0, %2;\nmapa.shared::cluster.u32 counter, %1, %2;\n"
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [there], {%3, %4, %5, %6}, [counter];\n}"
        :: "r"(here), "r"(barrier), "r"(block), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w) : "memory");
}

// mbarrier.init, and fence.mbarrier_init, which publishes initialised mbarriers: other blocks may use them after the next cluster barrier.
__device__ __forceinline__ void barrier_init(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(barrier), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void publish_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
// mbarrier.arrive.expect_tx: arrives, and makes the current phase also wait for `bytes` bytes of asynchronous copies.
__device__ __forceinline__ void barrier_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(barrier), "r"(bytes) : "memory");
}
// mbarrier.arrive; mbarrier.try_wait in a loop until the phase with this parity completes. Writes before the arrivals are then visible.
__device__ __forceinline__ void barrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(barrier) : "memory");
}
__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
    asm volatile(
        "{\n.reg .pred done;\nAGAIN:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra AGAIN;\n}"
        :: "r"(barrier), "r"(parity) : "memory");
}
// mbarrier.try_wait until phase 0 completes, with acquire semantics at cluster scope: what other blocks sent to this mbarrier is then visible.
__device__ __forceinline__ void barrier_wait_first(u32 barrier) {
    asm volatile(
        "{\n.reg .pred open;\nAGAIN:\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 open, [%0], 0;\n@!open bra AGAIN;\n}"
        :: "r"(barrier) : "memory");
}

// cp.async.cg: copies 16 bytes and bypasses L1; writes zeros if not `in`. L2 prefetches LINE bytes around them.
template <int LINE> __device__ __forceinline__ void copy16(u32 to, const void* from, bool in = true) {
    static_assert(LINE == 128 || LINE == 256);
    if constexpr (LINE == 128)
        asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" :: "r"(to), "l"(from), "r"(in ? 16 : 0) : "memory");
    else asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;" :: "r"(to), "l"(from), "r"(in ? 16 : 0) : "memory");
}
// cp.async.ca: copies 4 or 8 bytes through L1; writes zeros if not `in`.
template <int SIZE> __device__ __forceinline__ void copy(u32 to, const void* from, bool in = true) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" :: "r"(to), "l"(from), "n"(SIZE), "r"(in ? SIZE : 0) : "memory");
}
// cp.async.commit_group; .wait_group, which leaves at most the PENDING newest groups of the thread in flight; .wait_all.
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING> __device__ __forceinline__ void wait_copies() { asm volatile("cp.async.wait_group %0;" :: "n"(PENDING) : "memory"); }
__device__ __forceinline__ void wait_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// cp.async.mbarrier.arrive.noinc: arrives when all cp.async copies that this thread has issued so far are complete.
__device__ __forceinline__ void barrier_arrive_after_copies(u32 barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" :: "r"(barrier) : "memory");
}
// fence.proxy.async: makes this thread's earlier shared-memory writes visible to the async proxy, which wgmma and bulk copies use.
__device__ __forceinline__ void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// cp.async.bulk: copies a multiple of 16 bytes to shared memory and counts them at an mbarrier; .prefetch brings them into L2 only.
__device__ __forceinline__ void copy_bulk(u32 to, const void* from, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
        :: "r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}
__device__ __forceinline__ void prefetch_bulk(const void* from, u32 bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" :: "l"(from), "r"(bytes) : "memory");
}

// ld.shared.v4.
__device__ __forceinline__ uint4 load_shared(u32 from) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(from) : "memory");
    return v;
}
// st.global.v4.
__device__ __forceinline__ void store16(u16* to, uint4 v) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" :: "l"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

// ldmatrix.trans: 2 * COUNT matrices of 8x8 16-bit numbers; lane (g, t) gets column g of rows 2 t and 2 t + 1 of each matrix. Lanes 8 i to 8 i + 7
// pass the row addresses of matrix i in `row`.
template <int COUNT> __device__ __forceinline__ void load_transposed(u32 (&to)[2 * COUNT], u32 row) {
    static_assert(COUNT == 1 || COUNT == 2);
    if constexpr (COUNT == 2)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
            : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(row) : "memory");
    else asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];" : "=r"(to[0]), "=r"(to[1]) : "r"(row) : "memory");
}

// ldmatrix: four matrices of eight rows of 16 bytes. Lanes 8 i to 8 i + 7 pass the row addresses of matrix i; lane (g, t) gets bytes 4 t to 4 t + 3
// of row g of each matrix.
__device__ __forceinline__ uint4 matrices(u32 row) {
    uint4 v;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
        : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(row) : "memory");
    return v;
}

// mma.m16n8k16 in bfloat16. Lane (g, t) of the warp passes its fragments of rows g and g + 8 of the left operand (`g_*`, `h_*`) and of column g of
// the right one (`x_*`).
__device__ __forceinline__ void mma_bf16(float (&sums)[4], u32 g_low, u32 h_low, u32 g_high, u32 h_high, u32 x_low, u32 x_high) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(g_low), "r"(h_low), "r"(g_high), "r"(h_high), "r"(x_low), "r"(x_high));
}

// Conversions from and to bfloat16; the first number of a pair is in the lower 16 bits.
__device__ __forceinline__ float of_bf16(u16 bits) { return __uint_as_float((u32)bits << 16); }
__device__ __forceinline__ u16 to_bf16(float x) {
    u16 bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
}
__device__ __forceinline__ u32 to_bf16x2(float low, float high) {
    u32 both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}

// `bits & mask | base` in one instruction; the compiler would use two.
__device__ __forceinline__ u32 set_bits(u32 base, u32 bits, u32 mask) {
    u32 out;
    asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(out) : "r"(bits), "r"(mask), "r"(base));
    return out;
}

// Two int4 codes, the low four bits of both halves of a word, minus their zero point, in bfloat16. As the last bits of 128 a code is 128 + code.
// `minus_zero`: -128 - zero, twice.
__device__ __forceinline__ u32 widen_codes(u32 codes, u32 minus_zero) {
    u32 out;
    asm("add.rn.bf16x2 %0, %1, %2;" : "=r"(out) : "r"(set_bits(0x43004300, codes, 0x000F000F)), "r"(minus_zero));
    return out;
}
__device__ __forceinline__ float of_f16(u16 bits) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
    return x;
}
// The scale and the zero point of a group of codes, two float16 numbers: the scale, and `minus_zero`.
__device__ __forceinline__ float group_scale(u32 both, u32& minus_zero) {
    const float number = -128.0f - of_f16(both >> 16);
    minus_zero = to_bf16x2(number, number);
    return of_f16(both & 0xFFFF);
}

// ex2.approx.ftz.
__device__ __forceinline__ float exp2_of(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// rcp.approx.ftz.
__device__ __forceinline__ float reciprocal_of(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// x times the sigmoid of `slope`, without the instructions for subnormal numbers of __expf and of a division.
__device__ __forceinline__ float times_sigmoid(float x, float slope) {
    return x * reciprocal_of(1.0f + exp2_of(slope * -1.4426950408889634f));
}

// `top`, or 0 if it is NO_SCORE, so that subtracting it from minus infinity gives no NaN.
#define NO_SCORE __int_as_float(0xFF800000)  // minus infinity, for which NVRTC has no constant
__device__ __forceinline__ float finite_top(float top) { return top == NO_SCORE ? 0.0f : top; }

// shfl.sync.bfly: each of LANES lanes gets their sum. `sum_of_lanes` first adds lanes LANES / 2 apart; `sum_of_four` first adds adjacent lanes.
template <int LANES> __device__ __forceinline__ float sum_of_lanes(float x) {
    #pragma unroll
    for (int apart = LANES / 2; apart > 0; apart /= 2) x += __shfl_xor_sync(~0u, x, apart);
    return x;
}
__device__ __forceinline__ float sum_of_four(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}
