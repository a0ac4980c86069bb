// Blocks of a cluster that send sums to each other through distributed shared memory, by the types of `fragments.cu`.
//
// Sources: PTX ISA, "mapa", "st.async", "mbarrier", "barrier.cluster".

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }

// A barrier that opens when so many bytes have come from the blocks of the cluster.
__device__ __forceinline__ void barrier_init(const u64* barrier, u32 bytes) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(shared_address(barrier)) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(shared_address(barrier)), "r"(bytes) : "memory");
}

__device__ __forceinline__ void barrier_wait(const u64* barrier) {
    asm volatile(
        "{\n.reg .pred open;\nAGAIN:\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 open, [%0], 0;\n@!open bra AGAIN;\n}"
        :: "r"(shared_address(barrier)) : "memory");
}

// Store to the shared memory of a block of the cluster, and count it there; the addresses are those of this block.
__device__ __forceinline__ void send(int block, const float* to, const u64* barrier, float4 v) {
    asm volatile(
        "{\n.reg .u32 there, counter;\nmapa.shared::cluster.u32 there, %0, %2;\nmapa.shared::cluster.u32 counter, %1, %2;\n"
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [there], {%3, %4, %5, %6}, [counter];\n}"
        :: "r"(shared_address(to)), "r"(shared_address(barrier)), "r"(block), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w) : "memory");
}
