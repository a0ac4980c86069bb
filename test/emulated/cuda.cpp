// The part of `cuda.h` that does not depend on the kernel: compiled once, and linked to the program of each kernel.

#include "cuda.h"

#include <sys/mman.h>
#include <ucontext.h>

#include <cstdio>
#include <cstdlib>
#include <deque>
#include <vector>

namespace emulation {

constexpr int STACK = 256 << 10, MOST_IDLE = 100000;

struct Copy { char* to; const char* from; int size, whole; };

// Fibers that have begun are switched by `__builtin_setjmp` and `__builtin_longjmp`, because `swapcontext` calls the system twice. The functions
// that do so are `noipa`: their callers must not infer from their code which registers and memory they leave alone.
struct Fiber : Thread {
    void* at[5];  // where it goes on
    ucontext_t context;  // its start
    unsigned phase;  // of the cluster's barrier at which the thread arrived last
    const unsigned* waits_for = nullptr;  // a counter that must change before it goes on
    unsigned counted;  // its value until then
    bool begun = false, ended = false;
    std::deque<std::vector<Copy>> copies;
};

alignas(1024) char memory[MOST_BLOCKS][SPACE];
Warp* warps;
Block* blocks_at_once;
int blocks_of_each_cluster;
Thread* current;
Position grid_size;

static void* scheduler[5];
static std::vector<Fiber> fibers;
static std::vector<char*> stacks;  // of fibers, for all launches
static int threads_left, cluster_arrived;
static unsigned cluster_phase;
static long progress;

void fail(const char* what) {
    std::fprintf(stderr, "emulated kernel: %s\n", what);
    std::abort();
}

static Fiber& running() { return *(Fiber*)current; }

[[gnu::noipa]] static void jump(void** to) { __builtin_longjmp(to, 1); }

[[gnu::noipa]] static void yield() {
    if (!__builtin_setjmp(running().at)) jump(scheduler);
}

static void wait_for_change(const unsigned& counter, unsigned counted) {
    running().waits_for = &counter, running().counted = counted;
    if (counter == counted) yield();
    running().waits_for = nullptr;
}

void meet(Meeting& at, int count) {
    const unsigned round = at.round;
    if (++at.arrived == count) at.arrived = 0, at.round++, progress++;
    else wait_for_change(at.round, round);
}

// ---- instructions

static float of_half(unsigned short bits) {
    const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
    const float size = exponent == 31 ? (mantissa ? NAN : INFINITY)
                     : exponent ? std::ldexp(1024 + mantissa, exponent - 25) : std::ldexp((float)mantissa, -24);
    return bits >> 15 ? -size : size;
}

template <class Widen> static void multiply(float* const (&sums)[4], const unsigned (&own)[6], Widen widen) {
    struct Operands { float left[2][4], right[4]; } mine, all[WARP];  // left: rows g and g + 8
    for (int i = 0; i < 4; i++)
        for (int half = 0; half < 2; half++) mine.left[i % 2][i / 2 * 2 + half] = widen(own[i] >> 16 * half);
    for (int i = 0; i < 4; i++) mine.right[i] = widen(own[4 + i / 2] >> i % 2 * 16);
    exchange(mine, all);
    const int g = current->lane / 4, t = current->lane % 4;
    for (int i = 0; i < 4; i++) {
        const int column = 2 * t + i % 2;
        double sum = *sums[i];
        for (int k = 0; k < 16; k++) {
            const int at = k / 8 * 2 + k % 2, lane = k % 8 / 2;
            sum += (double)all[4 * g + lane].left[i / 2][at] * all[4 * column + lane].right[at];
        }
        *sums[i] = (float)sum;
    }
}
void mma_sync_aligned_m16n8k16_row_col_f32_f16_f16_f32(
    float& s0, float& s1, float& s2, float& s3, unsigned a, unsigned b, unsigned c, unsigned d, unsigned x, unsigned y
) {
    multiply({&s0, &s1, &s2, &s3}, {a, b, c, d, x, y}, [](unsigned bits) { return of_half((unsigned short)bits); });
}
void mma_sync_aligned_m16n8k16_row_col_f32_bf16_bf16_f32(
    float& s0, float& s1, float& s2, float& s3, unsigned a, unsigned b, unsigned c, unsigned d, unsigned x, unsigned y
) {
    multiply({&s0, &s1, &s2, &s3}, {a, b, c, d, x, y}, [](unsigned bits) { return of_bfloat16((unsigned short)bits); });
}

static unsigned half_of_e4m3(unsigned char bits) {  // exact
    const int sign = (bits & 128) << 8, exponent = bits >> 3 & 15, mantissa = bits & 7;
    if (exponent == 15 && mantissa == 7) return sign | 0x7FFF;
    if (exponent) return sign | (exponent + 8) << 10 | mantissa << 7;
    if (mantissa == 0) return sign;
    const int top = mantissa >= 4 ? 2 : mantissa >= 2 ? 1 : 0;  // mantissa * 2^-9
    return sign | (top + 6) << 10 | ((mantissa << (3 - top)) & 7) << 7;
}
void four_e4m3_to_float16(unsigned& low, unsigned& high, unsigned four) {
    low = half_of_e4m3(four) | half_of_e4m3(four >> 8) << 16;
    high = half_of_e4m3(four >> 16) | half_of_e4m3(four >> 24) << 16;
}

static unsigned half_of(double x) {
    if (std::isnan(x)) return 0x7FFF;
    const unsigned sign = std::signbit(x) ? 0x8000 : 0;
    const double size = std::fabs(x);
    if (size >= 65520) return sign | 0x7C00;  // rounded to infinity
    const int exponent = size < std::ldexp(1.0, -14) ? -14 : std::ilogb(size);
    return sign | ((exponent + 14) << 10) + (unsigned)std::nearbyint(std::ldexp(size, 10 - exponent));  // a carry goes into the exponent
}
void fma_rn_f16x2(unsigned& out, unsigned a, unsigned b, unsigned c) {  // rounded once if the sum is exact in float64
    const auto one = [&](int at) { return half_of((double)of_half(a >> at) * of_half(b >> at) + of_half(c >> at)); };
    out = one(0) | one(16) << 16;
}

void cvt_f32_f16(float& out, unsigned short bits) { out = of_half(bits); }

void copy_later(unsigned to, const void* from, int size, int whole) {
    aligned(of_shared(to), whole);
    if (size) aligned(from, whole);
    std::memset(of_shared(to), 0xFF, whole);
    running().copies.back().push_back({of_shared(to), (const char*)from, size, whole});
}
void cp_async_commit_group() { running().copies.emplace_back(); }
void cp_async_wait_group(int pending) {  // the last group is the open one
    auto& copies = running().copies;
    while ((int)copies.size() > pending + 1) {
        for (const Copy& copy : copies.front()) {
            std::memset(copy.to, 0, copy.whole);
            if (copy.size) std::memcpy(copy.to, copy.from, copy.size);
        }
        copies.pop_front();
    }
}

void count(unsigned at, int arrivals, int bytes) {
    Barrier& barrier = barrier_at(at);
    progress++;
    barrier.pending -= arrivals, barrier.bytes += bytes;
    if (barrier.pending == 0 && barrier.bytes == 0) barrier.pending = barrier.count, barrier.phase++;
}
void wait_for_mbarrier(unsigned at, unsigned parity) {
    while ((barrier_at(at).phase & 1) == parity) yield();
}
void barrier_cluster_arrive_relaxed() {
    running().phase = cluster_phase;
    if (++cluster_arrived == (int)fibers.size()) cluster_arrived = 0, cluster_phase++, progress++;
}
void barrier_cluster_wait_acquire() { wait_for_change(cluster_phase, running().phase); }

// ---- launches

static void (*launched)(void** args);
static void** launched_args;

static void run_fiber() {
    launched(launched_args);
    running().ended = true;
    warps[current->warp].lanes--, own_block().threads_left--, threads_left--, progress++;
    jump(scheduler);
}

[[gnu::noipa]] static void resume(Fiber& fiber) {
    current = &fiber;
    if (__builtin_setjmp(scheduler)) return;
    if (fiber.begun) jump(fiber.at);
    fiber.begun = true;
    setcontext(&fiber.context);
}

static void prepare(Fiber& fiber, int i, int threads) {
    if (i == (int)stacks.size()) stacks.push_back((char*)mmap(nullptr, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    fiber.position = {(unsigned)(i % threads), 0, 0}, fiber.rank = i / threads, fiber.warp = i / WARP, fiber.lane = i % WARP;
    fiber.phase = 0, fiber.begun = fiber.ended = false, fiber.waits_for = nullptr;
    fiber.copies.assign(1, {});
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = stacks[i], fiber.context.uc_stack.ss_size = STACK, fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, run_fiber, 0);
}

static void run_cluster(int first_block, int size, int threads) {
    std::memset(memory, 0xFF, (size_t)size * SPACE);
    std::vector<Warp> all_warps(size * threads / WARP);
    std::vector<Block> all_blocks(size);
    warps = all_warps.data(), blocks_at_once = all_blocks.data(), blocks_of_each_cluster = size;
    fibers.resize(size * threads);
    threads_left = size * threads, cluster_arrived = 0, cluster_phase = 0;
    for (int i = 0; i < size; i++) all_blocks[i] = {{(unsigned)(first_block + i), 0, 0}, threads, {}};
    for (int i = 0; i < size * threads; i++) prepare(fibers[i], i, threads), warps[i / WARP].lanes++;
    long before = -1;
    for (int idle = 0; threads_left; idle = progress == before ? idle + 1 : 0) {
        if (idle > MOST_IDLE) fail("the threads wait for each other");
        before = progress;
        for (Fiber& fiber : fibers)
            if (!fiber.ended && !(fiber.waits_for && *fiber.waits_for == fiber.counted)) resume(fiber);
    }
}

void launch(int blocks, int threads, int cluster, void (*kernel)(void** args), void** args) {
    grid_size = {(unsigned)blocks, 1, 1};
    launched = kernel, launched_args = args;
    for (int i = blocks - cluster; i >= 0; i -= cluster) run_cluster(i, cluster, threads);
}

}  // namespace emulation
