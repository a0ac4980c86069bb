// Weights that go straight from memory into the fragments of mma.m16n8k16.
//
// Lane (g, t) of a warp loads 16 bytes of rows g and g + 8, which are LANE_COLUMNS neighbouring columns, and the same columns of token g.
// An instruction multiplies whichever 16 columns its lanes hold; as weights and tokens agree on the order, the sum over all columns is the
// same.
//
// Constants from the host: FORMAT (0: bfloat16, 1: e4m3 with float32 scales, 2: e2m1 with a scale for 32 columns), EARLY (whether the
// kernel starts before the previous one has ended), ACT (0: SiLU, 1: clamped SwiGLU, 2: GELU).

typedef unsigned char u8; typedef unsigned short u16; typedef unsigned int u32; typedef unsigned long long u64;

constexpr int LANE_COLUMNS = FORMAT == 0 ? 8 : FORMAT == 1 ? 16 : 32;  // in 16 bytes
constexpr int CHUNK = 4 * LANE_COLUMNS;                               // columns of one load of a warp

__device__ __forceinline__ uint4 stream16(const u8* at) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at));
    return v;
}

__device__ __forceinline__ float of_bf16(u16 bits) { return __uint_as_float((u32)bits << 16); }

__device__ __forceinline__ u16 to_bf16(float x) {
    u16 bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
}

__device__ __forceinline__ u32 multiply2(u32 a, u32 b) {
    u32 out;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
    return out;
}

__device__ __forceinline__ void mma(float (&sums)[4], u32 g_low, u32 h_low, u32 g_high, u32 h_high, u32 x_low, u32 x_high) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(g_low), "r"(h_low), "r"(g_high), "r"(h_high), "r"(x_low), "r"(x_high));
}

// Bytes 0 and 2, or 1 and 3, of e4m3 as bfloat16: exponent and mantissa move to their places, and a multiplication by 2^120 mends the bias, of
// subnormal numbers too.
__device__ __forceinline__ u32 widen_even(u32 w) { return multiply2((w << 4 & 0x07F007F0) | (w << 8 & 0x80008000), 0x7B807B80); }
__device__ __forceinline__ u32 widen_odd(u32 w) { return multiply2((w >> 4 & 0x07F007F0) | (w & 0x80008000), 0x7B807B80); }

// Likewise the e2m1 numbers in the low, or in the high four bits of those bytes. `factor` holds the scale times 2^126.
__device__ __forceinline__ u32 low_even(u32 w, u32 factor) { return multiply2((w << 6 & 0x01C001C0) | (w << 12 & 0x80008000), factor); }
__device__ __forceinline__ u32 high_even(u32 w, u32 factor) { return multiply2((w << 2 & 0x01C001C0) | (w << 8 & 0x80008000), factor); }
__device__ __forceinline__ u32 low_odd(u32 w, u32 factor) { return multiply2((w >> 2 & 0x01C001C0) | (w << 4 & 0x80008000), factor); }
__device__ __forceinline__ u32 high_odd(u32 w, u32 factor) { return multiply2((w >> 6 & 0x01C001C0) | (w & 0x80008000), factor); }

// Eight columns of a token in the order in which the functions above take weights from a word: 0 2 1 3 4 6 5 7.
__device__ __forceinline__ uint4 reordered(uint4 v) {
    if (FORMAT == 0) return v;
    return make_uint4(__byte_perm(v.x, v.y, 0x5410), __byte_perm(v.x, v.y, 0x7632), __byte_perm(v.z, v.w, 0x5410), __byte_perm(v.z, v.w, 0x7632));
}

// The scale of an e2m1 group, 2^(s - 127), times 2^126, twice: a scale above 128 counts as 128.
__device__ __forceinline__ u32 group_factor(u8 s) { return (u32)min((int)s, 128) * 0x00800080u + 126 * 0x00800080u; }

struct Weights {  // of one projection
    const u8* weight;
    const u8* scale;
    const u16* bias;
    int rows, columns;                                       // of one expert
    int expert_scales, row_scales, scale_rows, scale_columns;  // of e4m3; the last two are powers of two
};

struct Routing {  // of T tokens to TOP_K experts each
    const int* ids;        // [T, TOP_K]
    const float* weights;  // [T, TOP_K]
    int first, experts;    // ids of this process: first to first + experts
};

struct Row {  // one weight row of a lane
    const u8* at;
    const u8* scale;
};

__device__ __forceinline__ long row_bytes(int columns) { return FORMAT == 0 ? 2L * columns : FORMAT == 1 ? columns : columns / 2; }

__device__ __forceinline__ Row row_of(const Weights& w, int expert, int row) {
    const u8* at = w.weight + ((long)expert * w.rows + row) * row_bytes(w.columns);
    if (FORMAT == 1) return {at, w.scale + 4L * ((long)expert * w.expert_scales + (long)(row / w.scale_rows) * w.row_scales)};
    return {at, FORMAT == 2 ? w.scale + ((long)expert * w.rows + row) * (w.columns / 32) : nullptr};
}

// The block of e4m3 scales that a column lies in.
__device__ __forceinline__ int scale_block(const Weights& w, int column) { return column >> 31 - __clz(w.scale_columns); }

// Eight columns of a token, zeros for none.
__device__ __forceinline__ uint4 piece_of(const u16* token, int column) {
    return token == nullptr ? make_uint4(0, 0, 0, 0) : *(const uint4*)(token + column);
}

// `sums += two weight rows x a token`, for 16 bytes of each row in every lane: rows g and g + 8, token g, LANE_COLUMNS columns `reordered`. FORMAT 1
// takes the scales of the lane's rows, FORMAT 2 their `group_factor`.
__device__ __forceinline__ void multiply_piece(
    float (&sums)[4], const u32 (&ga)[4], const u32 (&hb)[4], u32 scale_a, u32 scale_b, const uint4 (&tokens)[LANE_COLUMNS / 8]
) {
    const u32* xs = (const u32*)tokens;
    if (FORMAT == 0) {
        mma(sums, ga[0], hb[0], ga[1], hb[1], xs[0], xs[1]);
        mma(sums, ga[2], hb[2], ga[3], hb[3], xs[2], xs[3]);
    } else if (FORMAT == 1) {
        float part[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        #pragma unroll
        for (int j = 0; j < 4; j++)
            mma(part, widen_even(ga[j]), widen_even(hb[j]), widen_odd(ga[j]), widen_odd(hb[j]), xs[2 * j], xs[2 * j + 1]);
        const float s = __uint_as_float(scale_a), u = __uint_as_float(scale_b);
        sums[0] += part[0] * s; sums[1] += part[1] * s;
        sums[2] += part[2] * u; sums[3] += part[3] * u;
    } else {
        #pragma unroll
        for (int j = 0; j < 4; j++) {
            mma(sums, low_even(ga[j], scale_a), low_even(hb[j], scale_b), low_odd(ga[j], scale_a), low_odd(hb[j], scale_b),
                xs[2 * j], xs[2 * j + 1]);
            mma(sums, high_even(ga[j], scale_a), high_even(hb[j], scale_b), high_odd(ga[j], scale_a), high_odd(hb[j], scale_b),
                xs[8 + 2 * j], xs[8 + 2 * j + 1]);
        }
    }
}

__device__ __forceinline__ void wait_for_previous() {
    if (EARLY) asm volatile("griddepcontrol.launch_dependents;\ngriddepcontrol.wait;" ::: "memory");
}

__device__ __forceinline__ float activate(float gate, float up, float alpha, float limit) {
    if (ACT == 1) {
        gate = fminf(gate, limit);
        up = fminf(fmaxf(up, -limit), limit);
        return gate / (1.0f + __expf(-alpha * gate)) * (up + 1.0f);
    }
    const float inner = ACT == 2 ? 1.5957691216057308f * (gate + 0.044715f * gate * gate * gate) : gate;
    return gate / (1.0f + __expf(-inner)) * up;
}
