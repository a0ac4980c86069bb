// CUDA C++ on a CPU, for tests of kernels: the threads of a cluster are fibers, and clusters run one after another, the last one first.
//
// Lanes of a warp meet at each collective instruction, and threads of a block at __syncthreads. What cp.async copies is garbage until the thread
// waits for it, so that a missing wait changes results. Vectors that are not aligned end the process, as reads past a guarded tensor do.
// TMA and WGMMA are not emulated: a kernel that uses another instruction ends the process.

#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <type_traits>
#include <vector>

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

constexpr int WARP = 32, WORDS = 8, STACK = 256 << 10, MOST_IDLE = 100000;
constexpr int MOST_BLOCKS = 16, FIXED = 64 << 10, SPACE = FIXED + (227 << 10);  // of a cluster; bytes of a block for variables, and in all

alignas(1024) inline char memory[MOST_BLOCKS][SPACE];  // the shared memory of each block; an address is an offset in it

[[noreturn]] inline void fail(const char* what) {
    std::fprintf(stderr, "emulated kernel: %s\n", what);
    std::abort();
}

struct Position { unsigned x, y, z; };
struct Copy { char* to; const char* from; int size, whole; };
struct Meeting { int arrived = 0; unsigned round = 0; };
struct Warp { Meeting meeting; int lanes = 0; unsigned words[2][WARP][WORDS]; };
struct Block { Position index; int threads_left; Meeting meeting; };
struct Fiber {
    ucontext_t context;
    std::vector<char> stack;
    Position thread;
    int rank, warp, lane;
    unsigned phase;  // of the cluster's barrier at which the thread arrived last
    bool ended = false;
    std::deque<std::vector<Copy>> copies;
};

inline ucontext_t scheduler;
inline std::vector<Fiber> fibers;
inline std::vector<Warp> warps;
inline std::vector<Block> blocks_at_once;
inline Fiber* current;
inline int threads_left, cluster_arrived;
inline unsigned cluster_phase;
inline long progress;
inline Position grid_size;

inline void yield() { swapcontext(&current->context, &scheduler); }

inline void meet(Meeting& at, int count) {
    const unsigned round = at.round;
    if (++at.arrived == count) at.arrived = 0, at.round++, progress++;
    else
        while (at.round == round) yield();
}

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

inline float of_half(unsigned short bits) {
    const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
    const float size = exponent == 31 ? (mantissa ? NAN : INFINITY)
                     : exponent ? std::ldexp(1024 + mantissa, exponent - 25) : std::ldexp((float)mantissa, -24);
    return bits >> 15 ? -size : size;
}
inline unsigned half_of_e4m3(unsigned char bits) {  // exact
    const int sign = (bits & 128) << 8, exponent = bits >> 3 & 15, mantissa = bits & 7;
    if (exponent == 15 && mantissa == 7) return sign | 0x7FFF;
    if (exponent) return sign | (exponent + 8) << 10 | mantissa << 7;
    if (mantissa == 0) return sign;
    const int top = mantissa >= 4 ? 2 : mantissa >= 2 ? 1 : 0;  // mantissa * 2^-9
    return sign | (top + 6) << 10 | ((mantissa << (3 - top)) & 7) << 7;
}
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
inline void rsqrt_approx_ftz_f32(float& out, float x) { out = 1 / std::sqrt(x); }

template <class Widen> void multiply(float& s0, float& s1, float& s2, float& s3, const unsigned (&own)[6], Widen widen) {
    struct Operands { unsigned words[6]; } mine, all[WARP];
    std::memcpy(mine.words, own, sizeof own);
    exchange(mine, all);
    const int g = current->lane / 4, t = current->lane % 4;
    float* const sums[4] = {&s0, &s1, &s2, &s3};
    for (int i = 0; i < 4; i++) {
        const int column = 2 * t + i % 2;
        double sum = *sums[i];
        for (int k = 0; k < 16; k++) {
            const unsigned left = all[4 * g + k % 8 / 2].words[k / 8 * 2 + i / 2], right = all[4 * column + k % 8 / 2].words[4 + k / 8];
            sum += (double)widen(left >> k % 2 * 16) * widen(right >> k % 2 * 16);
        }
        *sums[i] = (float)sum;
    }
}
inline void mma_sync_aligned_m16n8k16_row_col_f32_f16_f16_f32(
    float& s0, float& s1, float& s2, float& s3, unsigned a, unsigned b, unsigned c, unsigned d, unsigned x, unsigned y
) {
    multiply(s0, s1, s2, s3, {a, b, c, d, x, y}, [](unsigned bits) { return of_half((unsigned short)bits); });
}
inline void mma_sync_aligned_m16n8k16_row_col_f32_bf16_bf16_f32(
    float& s0, float& s1, float& s2, float& s3, unsigned a, unsigned b, unsigned c, unsigned d, unsigned x, unsigned y
) {
    multiply(s0, s1, s2, s3, {a, b, c, d, x, y}, [](unsigned bits) { return of_bfloat16((unsigned short)bits); });
}
inline void four_e4m3_to_float16(unsigned& low, unsigned& high, unsigned four) {
    low = half_of_e4m3(four) | half_of_e4m3(four >> 8) << 16;
    high = half_of_e4m3(four >> 16) | half_of_e4m3(four >> 24) << 16;
}
inline void lop3_b32(unsigned& out, unsigned a, unsigned b) { out = (a & 0x0E0E0E0E) | (b & ~0x0E0E0E0Eu); }
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

inline void copy_later(unsigned to, const void* from, int size, int whole) {
    aligned(of_shared(to), whole);
    if (size) aligned(from, whole);
    std::memset(of_shared(to), 0xFF, whole);
    current->copies.back().push_back({of_shared(to), (const char*)from, size, whole});
}
inline void cp_async_cg_shared_global_L2__128B(unsigned to, const void* from, int size) { copy_later(to, from, size, 16); }
inline void cp_async_cg_shared_global_L2__256B(unsigned to, const void* from, int size) { copy_later(to, from, size, 16); }
inline void cp_async_ca_shared_global(unsigned to, const void* from, int whole, int size) { copy_later(to, from, size, whole); }
inline void cp_async_commit_group() { current->copies.emplace_back(); }
inline void cp_async_wait_group(int pending) {  // the last group is the open one
    while ((int)current->copies.size() > pending + 1) {
        for (const Copy& copy : current->copies.front()) {
            std::memset(copy.to, 0, copy.whole);
            if (copy.size) std::memcpy(copy.to, copy.from, copy.size);
        }
        current->copies.pop_front();
    }
}
inline void cp_async_wait_all() { cp_async_commit_group(), cp_async_wait_group(0); }

struct Barrier { unsigned char count, pending; short phase; int bytes; };
inline Barrier& barrier_at(unsigned at) { return *(Barrier*)of_shared(at); }
inline void mbarrier_init_shared__cta_b64(unsigned at, unsigned count) { barrier_at(at) = {(unsigned char)count, (unsigned char)count, 0, 0}; }
inline void count(unsigned at, int arrivals, int bytes) {
    Barrier& barrier = barrier_at(at);
    progress++;
    barrier.pending -= arrivals, barrier.bytes += bytes;
    if (barrier.pending == 0 && barrier.bytes == 0) barrier.pending = barrier.count, barrier.phase++;
}
inline void mbarrier_arrive_shared__cta_b64(unsigned at) { count(at, 1, 0); }
inline void mbarrier_arrive_expect_tx_shared__cta_b64(unsigned at, unsigned bytes) { count(at, 1, (int)bytes); }
inline void fence_mbarrier_init_release_cluster() {}

inline void rank_of_block(unsigned& out) { out = current->rank; }
inline void blocks_of_cluster(unsigned& out) { out = blocks_at_once.size(); }
inline void number_of_cluster(unsigned& out) { out = own_block().index.x / blocks_at_once.size(); }
inline void mapa_shared__cluster_u32(unsigned& out, unsigned address, unsigned rank) { out = address % SPACE + rank * SPACE; }
inline void barrier_cluster_arrive_relaxed() {
    current->phase = cluster_phase;
    if (++cluster_arrived == (int)fibers.size()) cluster_arrived = 0, cluster_phase++, progress++;
}
inline void barrier_cluster_arrive_release() { barrier_cluster_arrive_relaxed(); }
inline void barrier_cluster_wait_acquire() {
    while (cluster_phase == current->phase) yield();
}
inline void st_async_shared__cluster_mbarrier__complete_tx__bytes_v2_f32(unsigned to, float x, float y, unsigned at) {
    *(float2*)of_shared(to) = {x, y};
    count(at, 0, -8);
}
inline void send_to_block(unsigned to, unsigned at, unsigned rank, float x, float y, float z, float w) {
    mapa_shared__cluster_u32(to, to, rank), mapa_shared__cluster_u32(at, at, rank);
    *(float4*)of_shared(to) = {x, y, z, w};
    count(at, 0, -16);
}
inline void wait_for_mbarrier(unsigned at, unsigned parity = 0) {
    while ((barrier_at(at).phase & 1) == parity) yield();
}

// ---- launches

template <class Run> void run_fiber(Run* run) {
    (*run)();
    current->ended = true;
    warps[current->warp].lanes--, own_block().threads_left--, threads_left--, progress++;
}

template <class Run> void run_cluster(int first_block, int size, int threads, Run run) {
    std::memset(memory, 0xFF, (size_t)size * SPACE);
    fibers.resize(size * threads);
    warps.assign(size * threads / WARP, Warp());
    blocks_at_once.assign(size, Block());
    threads_left = size * threads, cluster_arrived = 0, cluster_phase = 0;
    for (int i = 0; i < size * threads; i++) {
        Fiber& fiber = fibers[i];
        Block& block = blocks_at_once[i / threads];
        block = {{(unsigned)(first_block + i / threads), 0, 0}, threads, {}};
        fiber.stack.resize(STACK);
        fiber.thread = {(unsigned)(i % threads), 0, 0}, fiber.rank = i / threads, fiber.warp = i / WARP, fiber.lane = i % WARP;
        fiber.phase = 0, fiber.ended = false;
        fiber.copies.assign(1, {});
        warps[fiber.warp].lanes++;
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack.data(), fiber.context.uc_stack.ss_size = STACK;
        fiber.context.uc_link = &scheduler;
        const auto start = run_fiber<Run>;
        makecontext(&fiber.context, (void (*)())start, 1, &run);
    }
    long before = -1;
    for (int idle = 0; threads_left; idle = progress == before ? idle + 1 : 0) {
        if (idle > MOST_IDLE) fail("the threads wait for each other");
        before = progress;
        for (Fiber& fiber : fibers) {
            if (fiber.ended) continue;
            current = &fiber;
            swapcontext(&scheduler, &fiber.context);
        }
    }
}

template <class Run> void launch(int blocks, int threads, int cluster, Run run) {
    grid_size = {(unsigned)blocks, 1, 1};
    for (int i = blocks - cluster; i >= 0; i -= cluster) run_cluster(i, cluster, threads, run);
}

}  // namespace emulation

#define threadIdx (emulation::current->thread)
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
