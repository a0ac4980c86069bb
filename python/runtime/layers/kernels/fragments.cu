// Loads weights from memory directly into the fragments of mma.m16n8k16.
//
// Lane (g, t) of a warp loads 16 bytes of rows g and g + 8, which are LANE_COLUMNS adjacent columns, and the same columns of token g. An
// instruction multiplies any 16 columns that its lanes have: weights and tokens have the same order, so the sum over all columns is the same.
//
// bfloat16 weights are used unchanged. e4m3 and e2m1 weights are converted to float16, which represents them exactly and is cheaper to convert
// to; scales are applied to partial sums. int4 weights are computed in float16. Tokens are then converted to float16 too, scaled by a power
// of two chosen by their largest entry.
//
// Constants from the host: FORMAT (0: bfloat16, 1: e4m3 with float32 scales, 2: e2m1 with one scale per 32 columns, 3: int4 with a
// float16 scale and zero point per group of columns), EARLY (whether the kernel starts before the preceding one has ended), ACT (0: SiLU,
// 1: clamped SwiGLU, 2: GELU).

constexpr int LANE_COLUMNS = FORMAT == 0 ? 8 : FORMAT == 1 ? 16 : 32;  // in 16 bytes
constexpr int CHUNK = 4 * LANE_COLUMNS;                               // columns of one load of a warp

__device__ __forceinline__ uint4 stream16(const u8* at) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at));
    return v;
}

// `sums += rows g and g + 8 of 16 columns x a token`, in bfloat16 for FORMAT 0 and in float16 otherwise.
__device__ __forceinline__ void mma(float (&sums)[4], u32 g_low, u32 h_low, u32 g_high, u32 h_high, u32 x_low, u32 x_high) {
    if (FORMAT == 0) mma_bf16(sums, g_low, h_low, g_high, h_high, x_low, x_high);
    else
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
            : "r"(g_low), "r"(h_low), "r"(g_high), "r"(h_high), "r"(x_low), "r"(x_high));
}

// Four e4m3 numbers as float16, in order; one instruction converts two.
__device__ __forceinline__ uint2 widen_e4m3(u32 four) {
    uint2 out;
    asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %2;\ncvt.rn.f16x2.e4m3x2 %0, low;\ncvt.rn.f16x2.e4m3x2 %1, high;\n}"
        : "=r"(out.x), "=r"(out.y) : "r"(four));
    return out;
}

// The second or the first e2m1 number of each of four MXFP4 bytes (quantization/mxfp4.py) as float16, times 2^-14. The results are those of bytes
// 0 and 2, and of bytes 1 and 3. Sign, exponent and mantissa are at, or are shifted to, their positions in the upper byte of a float16;
// a subnormal number stays subnormal.
__device__ __forceinline__ uint2 widen_second_e2m1(u32 bytes) { return make_uint2(bytes << 8 & 0x8E008E00, bytes & 0x8E008E00); }
__device__ __forceinline__ uint2 widen_first_e2m1(u32 bytes) {
    u32 moved;  // bits of the mask from the first operand, the others from the second, in one instruction; the compiler would use two
    asm("lop3.b32 %0, %1, %2, 0x0E0E0E0E, 0xE4;" : "=r"(moved) : "r"(bytes >> 3), "r"(bytes << 7));
    return widen_second_e2m1(moved);
}

// Of a group of int4 codes, whose weights are (code - zero) * scale, in float16, each twice: the scale, -1024 - zero and -64 - zero.
struct Numbers {
    u32 scale, low_zero, high_zero;
};

__device__ __forceinline__ u32 fma2(u32 a, u32 b, u32 c) {  // of two float16 numbers each
    u32 out;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(c));
    return out;
}

__device__ __forceinline__ u32 mul2(u32 a, u32 b) {
    u32 out;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
    return out;
}
__device__ __forceinline__ Numbers numbers_of(u32 both) {  // scale and zero point
    const u32 zero = __byte_perm(both, 0, 0x3232), MINUS_ONE = 0xBC00BC00, LOW = 0xE400E400, HIGH = 0xD400D400;  // -1, -1024, -64
    return {__byte_perm(both, 0, 0x1010), fma2(zero, MINUS_ONE, LOW), fma2(zero, MINUS_ONE, HIGH)};
}

// The weights `(code - zero) * scale` of four bytes as float16, rounded once: the codes in the low four bits of bytes 0 and 2, then of bytes 1 and
// 3, then those in the high four bits of the same bytes. As the last bits of 1024 a code is 1024 + code, or 1024 + 16 * code. Weights beyond
// float16's range become infinite.
__device__ __forceinline__ uint4 widen_int4(u32 bytes, Numbers own) {
    const u32 BASE = 0x64006400, ONE = 0x3C003C00, SIXTEENTH = 0x2C002C00;
    const u32 a = fma2(set_bits(BASE, bytes, 0x000F000F), ONE, own.low_zero), b = fma2(set_bits(BASE, bytes >> 8, 0x000F000F), ONE, own.low_zero);
    const u32 c = fma2(set_bits(BASE, bytes, 0x00F000F0), SIXTEENTH, own.high_zero);
    const u32 d = fma2(set_bits(BASE, bytes >> 8, 0x00F000F0), SIXTEENTH, own.high_zero);
    return make_uint4(mul2(a, own.scale), mul2(b, own.scale), mul2(c, own.scale), mul2(d, own.scale));
}

// The scale of an e2m1 group in float32: 2^(s - 127), or 0 for s = 0.
__device__ __forceinline__ float group_factor(u8 s) { return __uint_as_float((u32)s << 23); }

// Eight columns of a token in the order in which `widen_second_e2m1` and `widen_int4` return the weights of a word: 0 2 1 3 4 6 5 7.
__device__ __forceinline__ uint4 reordered(uint4 v) {
    if (FORMAT < 2) return v;
    return make_uint4(__byte_perm(v.x, v.y, 0x5410), __byte_perm(v.x, v.y, 0x7632), __byte_perm(v.z, v.w, 0x5410), __byte_perm(v.z, v.w, 0x7632));
}

// Conversion of tokens to float16. A bfloat16 number with the biased exponent e gets the biased exponent e - base: it is multiplied by
// 2^(112 - base). `base` is 30 less than the biased exponent of the token's largest entry, whose exponent then is float16's largest. Entries
// of at least 2^-29 times the largest are exact; smaller ones lose bits or become 0. NaN and infinity are preserved. Magnitudes are compared
// as bits.
__device__ __forceinline__ u32 max2(u32 a, u32 b) {
    u32 out;
    asm("max.u16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
    return out;
}
__device__ __forceinline__ u32 largest2(u32 largest, u32 x) { return max2(largest, x & 0x7FFF7FFF); }
__device__ __forceinline__ u32 largest8(u32 largest, uint4 v) {
    return largest2(largest2(largest2(largest2(largest, v.x), v.y), v.z), v.w);
}
__device__ __forceinline__ u32 largest_of_warp(u32 x) {
    u32 out;
    asm volatile("redux.sync.max.u32 %0, %1, 0xffffffff;" : "=r"(out) : "r"(x));
    return out;
}
__device__ __forceinline__ int base_of(u32 largest) { return max(min((int)largest >> 7, 254) - 30, 0); }
__device__ __forceinline__ u32 narrow2(u32 x, int base) {
    const u32 smallest = base * 0x00800080u;
    return (max2(x & 0x7FFF7FFF, smallest) * 8 - smallest * 8) | (x & 0x80008000);
}
__device__ __forceinline__ uint4 narrow8(uint4 v, int base) {
    return make_uint4(narrow2(v.x, base), narrow2(v.y, base), narrow2(v.z, base), narrow2(v.w, base));
}

// The factor that undoes this scaling, and the 2^-14 of `widen_second_e2m1`: 2^(base - 112), or 2^(base - 98).
__device__ __forceinline__ float widening(int base) { return __uint_as_float((u32)(base + (FORMAT == 2 ? 29 : 15)) << 23); }

struct Norms {
    const float* squares;  // [M, parts], for the norm before the GEMM: the sums of squares that give the scale of a row
    int parts;
    float eps;
    const u16* gain;  // of the norm after the GEMM, and its outputs
    u16* scaled;
    float* next_squares;
    int next_columns, next_parts;  // of those outputs: the first columns of `out`, or all, and the blocks that compute them
};

struct Weights {  // of one projection
    const u8* weight;
    const u8* scale;
    const u16* bias;
    int rows, columns;                                       // of one expert
    // e4m3 scales of an expert, of a row of blocks; size of a block, powers of two. For int4, zero points count as scales, and a block is a group
    // of a row.
    int expert_scales, row_scales, scale_rows, scale_columns;
};

struct Routing {  // of T tokens to TOP_K experts each
    const int* ids;        // [T, TOP_K]
    const float* weights;  // [T, TOP_K]
    int first, experts;    // this process has the experts first to first + experts - 1
};

struct Row {  // one weight row of a lane; for FORMAT 2, the first row of a core matrix
    const u8* at;
    const u8* scale;
};

__device__ __forceinline__ long row_bytes(int columns) { return FORMAT == 0 ? 2L * columns : FORMAT == 1 ? columns : columns / 2; }

__device__ __forceinline__ Row row_of(const Weights& w, int expert, int row) {
    const u8* at = w.weight + ((long)expert * w.rows + row) * row_bytes(w.columns);
    if (FORMAT == 3) return {at, w.scale + 2L * ((long)expert * w.expert_scales + (long)row * w.row_scales)};
    if (FORMAT == 1) return {at, w.scale + 4L * ((long)expert * w.expert_scales + (long)(row >> 31 - __clz(w.scale_rows)) * w.row_scales)};
    return {at, FORMAT == 2 ? w.scale + ((long)expert * w.rows + row) * (w.columns / 32) : nullptr};
}

// The index of the block of e4m3 scales that contains a column.
__device__ __forceinline__ int scale_block(const Weights& w, int column) { return column >> 31 - __clz(w.scale_columns); }

// Eight columns of a token; zeros if there is no token.
__device__ __forceinline__ uint4 piece_of(const u16* token, int column) {
    return token == nullptr ? make_uint4(0, 0, 0, 0) : *(const uint4*)(token + column);
}

// `sums += two weight rows x a token`, for 16 bytes of each row in every lane: rows g and g + 8, token g, 16 columns of e4m3.
__device__ __forceinline__ void multiply_e4m3(float (&sums)[4], uint4 g_row, uint4 h_row, const uint4* tokens) {
    const u32 gs[4] = {g_row.x, g_row.y, g_row.z, g_row.w}, hs[4] = {h_row.x, h_row.y, h_row.z, h_row.w};
    const u32* const xs = (const u32*)tokens;
    #pragma unroll
    for (int j = 0; j < 4; j++) {
        const uint2 g = widen_e4m3(gs[j]), h = widen_e4m3(hs[j]);
        mma(sums, g.x, h.x, g.y, h.y, xs[2 * j], xs[2 * j + 1]);
    }
}

// The same for 32 columns of int4, whose tokens are `reordered`. `g_both`, `h_both`: scale and zero point of this lane's columns in each row.
__device__ __forceinline__ void multiply_int4(float (&sums)[4], uint4 g_row, uint4 h_row, u32 g_both, u32 h_both, const uint4* tokens) {
    const u32 gs[4] = {g_row.x, g_row.y, g_row.z, g_row.w}, hs[4] = {h_row.x, h_row.y, h_row.z, h_row.w};
    const u32* const xs = (const u32*)tokens;
    const Numbers g_own = numbers_of(g_both), h_own = numbers_of(h_both);
    #pragma unroll
    for (int j = 0; j < 4; j++) {
        const uint4 g = widen_int4(gs[j], g_own), h = widen_int4(hs[j], h_own);
        mma(sums, g.x, h.x, g.y, h.y, xs[2 * j], xs[2 * j + 1]);
        mma(sums, g.z, h.z, g.w, h.w, xs[8 + 2 * j], xs[8 + 2 * j + 1]);
    }
}

// `sums += part`, times a scale for row g and a scale for row g + 8.
__device__ __forceinline__ void add_scaled(float (&sums)[4], const float (&part)[4], float low, float high) {
    sums[0] += part[0] * low; sums[1] += part[1] * low;
    sums[2] += part[2] * high; sums[3] += part[3] * high;
}

__device__ __forceinline__ float activate(float gate, float up, float alpha, float limit) {
    if (ACT == 1) {
        gate = fminf(gate, limit);
        return times_sigmoid(gate, alpha * gate) * (fminf(fmaxf(up, -limit), limit) + 1.0f);
    }
    const float inner = ACT == 2 ? 1.5957691216057308f * (gate + 0.044715f * gate * gate * gate) : gate;
    return times_sigmoid(gate, inner) * up;
}
