// CUDA C++ on a CPU, for tests of kernels. `cuda.cpp` runs the threads of a cluster as fibers, and clusters one after another, the last one first.
//
// Lanes of a warp meet at each collective instruction, and threads of a block at __syncthreads. What cp.async copies is garbage until the thread
// waits for it, so that a missing wait changes results. Vectors that are not aligned end the process, as reads past a guarded tensor do.
// TMA and WGMMA are not emulated: a kernel that uses another instruction ends the process.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __maxnreg__(...)
#define __align__(n) __attribute__((aligned(n)))

struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(8) ushort4 { unsigned short x, y, z, w; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline ushort4 make_ushort4(unsigned short x, unsigned short y, unsigned short z, unsigned short w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

namespace emulation {

constexpr int WARP = 32, WORDS = 12;
constexpr int MOST_BLOCKS = 16, FIXED = 64 << 10, SPACE = FIXED + (227 << 10);  // of a cluster; bytes of a block for variables, and in all

extern char memory[MOST_BLOCKS][SPACE];  // the shared memory of each block; an address is an offset in it

[[noreturn]] void fail(const char* what);

struct Position { unsigned x, y, z; };
struct Meeting { int arrived = 0; unsigned round = 0; };
struct Warp { Meeting meeting; int lanes = 0; unsigned words[2][WARP][WORDS]; };
struct Block { Position index; int threads_left; Meeting meeting; };
struct Thread {
    Position position;
    int rank, warp, lane;
};

extern Warp* warps;
extern Block* blocks_at_once;
extern int blocks_of_each_cluster;
extern Thread* current;
extern Position grid_size;

void meet(Meeting& at, int count);  // waits until so many threads have arrived
void launch(int blocks, int threads, int cluster, void (*kernel)(void** args), void** args);

// What all lanes of the warp pass, for each lane.
template <class T> void exchange(const T& own, T (&all)[WARP]) {
    static_assert(sizeof(T) <= sizeof(unsigned) * WORDS);
    Warp& warp = warps[current->warp];
    auto& words = warp.words[warp.meeting.round & 1];  // lanes in the next round write the other half
    std::memcpy(words[current->lane], &own, sizeof(T));
    meet(warp.meeting, warp.lanes);
    for (int lane = 0; lane < WARP; lane++) std::memcpy(&all[lane], words[lane], sizeof(T));
}

inline Block& own_block() { return blocks_at_once[current->rank]; }

// The place of a variable in the shared memory of each block.
inline int allocate(int size, int alignment) {
    static int used;
    const int at = (used + alignment - 1) / alignment * alignment;
    used = at + size;
    if (used > FIXED) fail("too many shared variables");
    return at;
}
inline char* local(int at) { return memory[current->rank] + at; }
inline char* of_shared(unsigned address) { return memory[0] + address; }

inline float of_bfloat16(unsigned short bits) {
    const unsigned word = (unsigned)bits << 16;
    float x;
    std::memcpy(&x, &word, 4);
    return x;
}
inline unsigned short bfloat16_of(float x) {
    unsigned word;
    std::memcpy(&word, &x, 4);
    if (std::isnan(x)) return 0x7FFF;
    return (word + 0x7FFF + (word >> 16 & 1)) >> 16;
}

// ---- the instructions that programs contain as asm, named after their opcode

template <class... T> void nothing(T&...) {}
inline void griddepcontrol_launch_dependents() {}
inline void griddepcontrol_wait() {}
inline void prefetch_global_L2(const void*) {}
inline void ex2_approx_ftz_f32(float& out, float x) { out = std::exp2(x); }
inline void rcp_approx_ftz_f32(float& out, float x) { out = 1 / x; }
inline void rsqrt_approx_ftz_f32(float& out, float x) { out = 1 / std::sqrt(x); }

void mma_sync_aligned_m16n8k16_row_col_f32_f16_f16_f32(
    float& s0, float& s1, float& s2, float& s3, unsigned a, unsigned b, unsigned c, unsigned d, unsigned x, unsigned y
);
void mma_sync_aligned_m16n8k16_row_col_f32_bf16_bf16_f32(
    float& s0, float& s1, float& s2, float& s3, unsigned a, unsigned b, unsigned c, unsigned d, unsigned x, unsigned y
);
void four_e4m3_to_float16(unsigned& low, unsigned& high, unsigned four);
void fma_rn_f16x2(unsigned& out, unsigned a, unsigned b, unsigned c);
inline void mul_rn_f16x2(unsigned& out, unsigned a, unsigned b) { fma_rn_f16x2(out, a, b, 0x80008000); }
inline void add_rn_bf16x2(unsigned& out, unsigned a, unsigned b) {
    const auto one = [&](int at) { return (unsigned)bfloat16_of(of_bfloat16(a >> at) + of_bfloat16(b >> at)); };
    out = one(0) | one(16) << 16;
}
void cvt_f32_f16(float& out, unsigned short bits);
inline void lop3_b32(unsigned& out, unsigned a, unsigned b) { out = (a & 0x0E0E0E0E) | (b & ~0x0E0E0E0Eu); }
inline void lop3_b32(unsigned& out, unsigned a, unsigned mask, unsigned bits) { out = (a & mask) | bits; }
inline void max_u16x2(unsigned& out, unsigned a, unsigned b) {
    const unsigned low = (a & 0xFFFF) > (b & 0xFFFF) ? a : b, high = a >> 16 > b >> 16 ? a : b;
    out = (low & 0xFFFF) | (high & 0xFFFF0000);
}
inline void cvt_rn_bf16_f32(unsigned short& bits, float x) { bits = bfloat16_of(x); }
inline void cvt_rn_bf16x2_f32(unsigned& both, float high, float low) { both = bfloat16_of(low) | (unsigned)bfloat16_of(high) << 16; }
inline void redux_sync_max_u32(unsigned& out, unsigned x) {
    unsigned all[WARP];
    exchange(x, all);
    for (unsigned other : all) x = other > x ? other : x;
    out = x;
}
inline void aligned(const void* at, int size) {
    if ((uintptr_t)at % size) fail("an address is not aligned");
}
inline void ld_global_nc_L1__no_allocate_v4_u32(unsigned& x, unsigned& y, unsigned& z, unsigned& w, const void* at) {
    aligned(at, 16);
    const uint4 v = *(const uint4*)at;
    x = v.x, y = v.y, z = v.z, w = v.w;
}
inline void ld_global_L1__no_allocate_L2__256B_v4_u32(unsigned& x, unsigned& y, unsigned& z, unsigned& w, const void* at) {
    ld_global_nc_L1__no_allocate_v4_u32(x, y, z, w, at);
}
inline void st_global_v4_u32(void* at, unsigned x, unsigned y, unsigned z, unsigned w) {
    aligned(at, 16);
    *(uint4*)at = {x, y, z, w};
}
inline void ld_shared_v4_u32(unsigned& x, unsigned& y, unsigned& z, unsigned& w, unsigned at) {
    ld_global_nc_L1__no_allocate_v4_u32(x, y, z, w, of_shared(at));
}
inline void ld_global_v4_u32(unsigned& x, unsigned& y, unsigned& z, unsigned& w, const void* at) {
    ld_global_nc_L1__no_allocate_v4_u32(x, y, z, w, at);
}
inline void st_shared_v4_u32(unsigned at, unsigned x, unsigned y, unsigned z, unsigned w) { st_global_v4_u32(of_shared(at), x, y, z, w); }
template <int COUNT> void load_transposed(unsigned* const (&out)[COUNT], unsigned row) {
    unsigned rows[WARP];
    exchange(row, rows);
    const int g = current->lane / 4, t = current->lane % 4;
    for (int i = 0; i < COUNT; i++) {
        const unsigned short low = ((unsigned short*)of_shared(rows[8 * i + 2 * t]))[g], high = ((unsigned short*)of_shared(rows[8 * i + 2 * t + 1]))[g];
        *out[i] = low | (unsigned)high << 16;
    }
}
inline void ldmatrix_sync_aligned_m8n8_x4_trans_shared_b16(unsigned& x, unsigned& y, unsigned& z, unsigned& w, unsigned row) {
    load_transposed<4>({&x, &y, &z, &w}, row);
}
inline void ldmatrix_sync_aligned_m8n8_x2_trans_shared_b16(unsigned& x, unsigned& y, unsigned row) { load_transposed<2>({&x, &y}, row); }
inline void ldmatrix_sync_aligned_m8n8_x4_shared_b16(unsigned& x, unsigned& y, unsigned& z, unsigned& w, unsigned row) {
    unsigned rows[WARP];
    exchange(row, rows);
    unsigned* const out[4] = {&x, &y, &z, &w};
    for (int i = 0; i < 4; i++) std::memcpy(out[i], of_shared(rows[8 * i + current->lane / 4]) + current->lane % 4 * 4, 4);
}
inline void movmatrix_sync_aligned_m8n8_trans_b16(unsigned& out, unsigned x) {
    unsigned all[WARP];
    exchange(x, all);
    const int g = current->lane / 4, t = current->lane % 4;
    const auto at = [&](int row) { return all[4 * row + g / 2] >> g % 2 * 16 & 0xFFFF; };
    out = at(2 * t) | at(2 * t + 1) << 16;
}

void copy_later(unsigned to, const void* from, int size, int whole);
inline void cp_async_cg_shared_global_L2__128B(unsigned to, const void* from, int size) { copy_later(to, from, size, 16); }
inline void cp_async_cg_shared_global_L2__256B(unsigned to, const void* from, int size) { copy_later(to, from, size, 16); }
inline void cp_async_ca_shared_global(unsigned to, const void* from, int whole, int size) { copy_later(to, from, size, whole); }
void cp_async_commit_group();
void cp_async_wait_group(int pending);
inline void cp_async_wait_all() { cp_async_commit_group(), cp_async_wait_group(0); }

struct Barrier { unsigned char count, pending; short phase; int bytes; };
inline Barrier& barrier_at(unsigned at) { return *(Barrier*)of_shared(at); }
inline void mbarrier_init_shared__cta_b64(unsigned at, unsigned count) { barrier_at(at) = {(unsigned char)count, (unsigned char)count, 0, 0}; }
void count(unsigned at, int arrivals, int bytes);
inline void mbarrier_arrive_shared__cta_b64(unsigned at) { count(at, 1, 0); }
inline void mbarrier_arrive_expect_tx_shared__cta_b64(unsigned at, unsigned bytes) { count(at, 1, (int)bytes); }
inline void fence_mbarrier_init_release_cluster() {}

inline void rank_of_block(unsigned& out) { out = current->rank; }
inline void blocks_of_cluster(unsigned& out) { out = blocks_of_each_cluster; }
inline void number_of_cluster(unsigned& out) { out = own_block().index.x / blocks_of_each_cluster; }
inline void mapa_shared__cluster_u32(unsigned& out, unsigned address, unsigned rank) { out = address % SPACE + rank * SPACE; }
void barrier_cluster_arrive_relaxed();
inline void barrier_cluster_arrive_release() { barrier_cluster_arrive_relaxed(); }
void barrier_cluster_wait_acquire();
inline void st_async_shared__cluster_mbarrier__complete_tx__bytes_v2_f32(unsigned to, float x, float y, unsigned at) {
    *(float2*)of_shared(to) = {x, y};
    count(at, 0, -8);
}
inline void send_to_block(unsigned to, unsigned at, unsigned rank, float x, float y, float z, float w) {
    mapa_shared__cluster_u32(to, to, rank), mapa_shared__cluster_u32(at, at, rank);
    *(float4*)of_shared(to) = {x, y, z, w};
    count(at, 0, -16);
}
void wait_for_mbarrier(unsigned at, unsigned parity = 0);

}  // namespace emulation

#define threadIdx (emulation::current->position)
#define blockIdx (emulation::own_block().index)
#define gridDim emulation::grid_size

inline size_t __cvta_generic_to_shared(const void* at) { return (unsigned)((const char*)at - emulation::memory[0]); }
inline void __syncthreads() { emulation::meet(emulation::own_block().meeting, emulation::own_block().threads_left); }
inline void __syncwarp(unsigned = ~0u) {
    unsigned all[emulation::WARP];
    emulation::exchange(0u, all);
}
template <class T> T __shfl_sync(unsigned, T x, int lane) {
    T all[emulation::WARP];
    emulation::exchange(x, all);
    return all[lane & 31];
}
template <class T> T __shfl_xor_sync(unsigned mask, T x, int apart) { return __shfl_sync(mask, x, emulation::current->lane ^ apart); }
template <class T> T __shfl_up_sync(unsigned mask, T x, int apart) {
    const T other = __shfl_sync(mask, x, emulation::current->lane - apart);
    return emulation::current->lane < apart ? x : other;
}
inline unsigned __ballot_sync(unsigned, bool x) {
    bool all[emulation::WARP];
    emulation::exchange(x, all);
    unsigned bits = 0;
    for (int lane = 0; lane < emulation::WARP; lane++) bits |= (unsigned)all[lane] << lane;
    return bits;
}
inline bool __any_sync(unsigned mask, bool x) { return __ballot_sync(mask, x) != 0; }
inline unsigned __match_any_sync(unsigned, int x) {
    int all[emulation::WARP];
    emulation::exchange(x, all);
    unsigned bits = 0;
    for (int lane = 0; lane < emulation::WARP; lane++) bits |= (unsigned)(all[lane] == x) << lane;
    return bits;
}
template <class T, class Join> T __reduce(T x, Join join) {
    T all[emulation::WARP];
    emulation::exchange(x, all);
    for (T other : all) x = join(x, other);
    return x;
}
template <class T> T __reduce_min_sync(unsigned, T x) { return __reduce(x, [](T a, T b) { return a < b ? a : b; }); }
template <class T> T __reduce_or_sync(unsigned, T x) { return __reduce(x, [](T a, T b) { return a | b; }); }
template <class T> T __reduce_max_sync(unsigned, T x) { return __reduce(x, [](T a, T b) { return a > b ? a : b; }); }
template <class T> T atomicAdd(T* at, std::common_type_t<T> x) {
    const T before = *at;
    *at += x;
    return before;
}

template <class A, class B> constexpr std::common_type_t<A, B> min(A a, B b) { return (std::common_type_t<A, B>)a < (std::common_type_t<A, B>)b ? a : b; }
template <class A, class B> constexpr std::common_type_t<A, B> max(A a, B b) { return (std::common_type_t<A, B>)a > (std::common_type_t<A, B>)b ? a : b; }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(unsigned x) { return __builtin_ffs((int)x); }
inline int __clz(unsigned x) { return x ? __builtin_clz(x) : 32; }
inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)((uint64_t)a * b >> 32); }
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
    const uint64_t both = (uint64_t)b << 32 | a;
    unsigned out = 0;
    for (int i = 0; i < 4; i++) out |= (unsigned)(both >> (selector >> 4 * i & 7) * 8 & 255) << 8 * i;
    return out;
}
inline float __uint_as_float(unsigned x) {
    float y;
    std::memcpy(&y, &x, 4);
    return y;
}
inline float __int_as_float(int x) { return __uint_as_float((unsigned)x); }
inline unsigned __float_as_uint(float x) {
    unsigned y;
    std::memcpy(&y, &x, 4);
    return y;
}
inline float rsqrtf(float x) { return 1 / std::sqrt(x); }
inline float __expf(float x) { return std::exp(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
