// Stages of weights, of an expert or of a layer. A stage has 128 bytes of each of 16 rows with their scales in shared memory; a warp copies and
// multiplies it with the functions of `fragments.cu`. MXFP4 weights stay in core matrices: eight of the first eight rows, then eight of the others.
//
// Constants from the host, in addition to those of `fragments.cu`: EVEN (whether the columns fill whole stages), GROUP (columns of an int4 group:
// 32, 64 or 128; columns are then a multiple of 128).

#ifndef GROUP
#define GROUP 32
#endif

constexpr int STAGE_COLUMNS = 2 * CHUNK;
constexpr int SCALE_BYTES = FORMAT == 0 ? 0 : FORMAT == 1 ? 4 : FORMAT == 2 ? 16 : STAGE_COLUMNS / GROUP * 4;  // of a row in a stage
constexpr int STAGE_BYTES = 16 * (128 + SCALE_BYTES);  // the rows, then their scales
constexpr int TOKEN_PADDING = FORMAT == 1 ? 16 : 64;   // bytes after a token, so that adjacent tokens are in different banks
constexpr int RUN = FORMAT == 2 ? 8 : 1;               // rows whose bytes of a stage are contiguous in memory

// Keeps an address in its register; otherwise the compiler would recompute it in each stage.
__device__ __forceinline__ u32 kept(u32 address) {
    asm volatile("" : "+r"(address));
    return address;
}

// The swizzled position of a 16-byte piece in the 128 bytes of its row. Lanes read different banks both if eight lanes read four adjacent
// pieces of two rows, and if they read the same piece of eight rows.
__device__ __forceinline__ int place_of(int piece, int row) { return piece ^ ((row & 1) << 2 | (row & 7) >> 1); }

// Eight columns of a token in shared memory. For FORMAT 2 and 3, each 32 columns are in the order in which `matrices` distributes their weights to
// lanes: the 16 bytes of a lane are four columns of the first half and four of the second.
__device__ __forceinline__ u8* halves_of(u8* token, int piece) { return token + piece / 4 * 64 + (piece & 1) * 32 + (piece >> 1 & 1) * 8; }
__device__ __forceinline__ uint4 get_piece(u8* token, int piece) {
    if (FORMAT < 2) return *(const uint4*)(token + 16 * piece);
    const u8* const at = halves_of(token, piece);
    const uint2 a = *(const uint2*)at, b = *(const uint2*)(at + 16);
    return make_uint4(a.x, a.y, b.x, b.y);
}
__device__ __forceinline__ void put_piece(u8* token, int piece, uint4 v) {
    if (FORMAT < 2) {
        *(uint4*)(token + 16 * piece) = v;
    } else {
        u8* const at = halves_of(token, piece);
        *(uint2*)at = make_uint2(v.x, v.y);
        *(uint2*)(at + 16) = make_uint2(v.z, v.w);
    }
}

// Where a lane copies from: four pieces of 16 bytes of 16 rows, the first one at `rows`, and the scales of one row.
struct Sources {
    const u8 *rows, *scales;
    int scale_bytes;  // FORMAT 2 and 3: bytes from `scales` to the end of the row's scales
};

// The sources in rows `row` to row + 7 of an expert, and in the eight rows that begin `next` rows later.
__device__ __forceinline__ Sources sources_of(const Weights& w, int expert, int row, int next) {
    const int lane = threadIdx.x % 32;
    Sources from;
    from.rows = row_of(w, expert, row).at + (RUN == 8 ? lane * 16 : lane / 8 * row_bytes(w.columns) + lane % 8 * 16);
    if (FORMAT == 1) from.scales = row_of(w, expert, row + lane % 8 + (lane < 8 ? 0 : next)).scale;
    if (FORMAT == 2) {  // the eight scales of a row in a stage span at most two words of eight bytes
        const u8* const scale = row_of(w, expert, row + lane / 2 % 8 + (lane < 16 ? 0 : next)).scale;
        from.scales = (const u8*)((u64)scale & ~7ull) + lane % 2 * 8;
        from.scale_bytes = w.columns / 32 + (int)(scale - from.scales);
    }
    if (FORMAT == 3) {  // two lanes copy the numbers of a row
        from.scales = row_of(w, expert, row + lane / 2 % 8 + (lane < 16 ? 0 : next)).scale + lane % 2 * (SCALE_BYTES / 2);
        from.scale_bytes = w.columns / GROUP * 4 - lane % 2 * (SCALE_BYTES / 2);
    }
    return from;
}

struct Targets {  // where a lane copies to, in the first stage of a ring: the first two pieces, and the scales
    u32 first, second, scales;
};

__device__ __forceinline__ Targets targets_in(u32 ring) {
    const int lane = threadIdx.x % 32;
    if (FORMAT == 2) return {kept(ring + lane * 16), kept(ring + 512 + lane * 16), kept(ring + 2048 + lane * 8)};
    return {
        kept(ring + lane / 8 * 128 + place_of(lane % 8, lane / 8) * 16),  // rows lie 128 bytes apart
        kept(ring + (lane / 8 + 4) * 128 + place_of(lane % 8, lane / 8 + 4) * 16),
        kept(ring + 2048 + lane * (FORMAT == 3 ? SCALE_BYTES / 2 : 4)),
    };
}

// Copies stage `stage` of the rows to the ring's stage at byte offset `place`. `next` is that of `sources_of`.
__device__ __forceinline__ void copy_weights(const Weights& w, const Sources& from, int next, const Targets& to, int place, int stage) {
    const int lane = threadIdx.x % 32;
    const u32 first = to.first + place, second = to.second + place;
    const int size = row_bytes(w.columns);
    const u8 *const at = from.rows + 128L * RUN * stage, *const high = at + (long)next * size;
    const long apart = RUN == 8 ? 512 : 4L * size;                                    // bytes from the first piece to the second
    const int left = RUN * (size - 128 * stage) - (RUN == 8 ? lane : lane % 8) * 16;  // contiguous bytes from the first piece on
    const bool first_in = EVEN || left > 0, second_in = EVEN || left > (RUN == 8 ? 512 : 0);
    copy16<256>(first, at, first_in);
    copy16<256>(second, at + apart, second_in);
    copy16<256>(first + 1024, high, first_in);
    copy16<256>(second + 1024, high + apart, second_in);
    if (FORMAT == 1 && lane < 16) copy<4>(to.scales + place, from.scales + 4 * scale_block(w, stage * STAGE_COLUMNS));
    if (FORMAT == 2) copy<8>(to.scales + place, from.scales + 8 * stage, 8 * stage < from.scale_bytes);
    if (FORMAT == 3) copy<SCALE_BYTES / 2>(to.scales + place, from.scales + SCALE_BYTES * stage, SCALE_BYTES * stage < from.scale_bytes);
}

// Where lane (g, t) reads rows g and g + 8 in the first stage of a ring.
struct Fragments {
    const u8 *rows, *low_scale, *high_scale;
    int other_half;  // bytes from a row's first chunk to its second
    u32 group_rows;  // FORMAT 2 and 3: the lane's address for `matrices`: 16 bytes of one of 16 rows, in the first or the second 32 columns
    int next_groups, other_groups;  // FORMAT 3: bytes from these columns to those that are 64 and 128 columns further on
};

__device__ __forceinline__ Fragments fragments_in(const u8* ring) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    Fragments at;
    at.rows = ring + g * 128 + place_of(t, g) * 16;
    at.other_half = (g & 1) ? -64 : 64;
    at.low_scale = ring + 2048 + g * SCALE_BYTES;
    at.high_scale = at.low_scale + 8 * SCALE_BYTES;
    if (FORMAT == 3) {
        const int row = lane % 8;
        at.group_rows = kept(shared_address(ring) + lane / 8 % 2 * 1024 + row * 128 + place_of(lane / 16, row) * 16);
        at.next_groups = (row & 4) ? -32 : 32, at.other_groups = (row & 1) ? -64 : 64;
    } else {
        at.group_rows = kept(shared_address(ring) + lane / 16 * 128 + lane / 8 % 2 * 1024 + lane % 8 * 16);
    }
    return at;
}

// FORMAT 2: advances to the first scale, which need not be at the start of a word. `row` and `other` are rows g and g + 8 of the expert.
__device__ __forceinline__ void skip_to_scales(Fragments& at, const Weights& w, int expert, int row, int other) {
    if (FORMAT != 2) return;
    at.low_scale += (int)(u64)row_of(w, expert, row).scale & 7;
    at.high_scale += (int)(u64)row_of(w, expert, other).scale & 7;
}

// `multiply_stage` for FORMAT 3.
template <int N, int MOST> __device__ __forceinline__ void multiply_int4(
    float (&sums)[MOST][4], const Fragments& own, int place, const u8* tokens, int stride
) {
    Numbers low, high;
    #pragma unroll
    for (int run = 0; run < 8; run += 2) {  // of 32 columns
        const uint4 v = matrices(own.group_rows + place + (run & 2 ? own.next_groups : 0) + (run & 4 ? own.other_groups : 0));
        const u32 words[4] = {v.x, v.y, v.z, v.w};
        #pragma unroll
        for (int k = 0; k < 2; k++) {
            if ((run + k) * 32 % GROUP == 0) {
                const int number = place + (run + k) * 32 / GROUP * 4;
                low = numbers_of(*(const u32*)(own.low_scale + number)), high = numbers_of(*(const u32*)(own.high_scale + number));
            }
            const uint4 a = widen_int4(words[2 * k], low), b = widen_int4(words[2 * k + 1], high);
            #pragma unroll
            for (int n = 0; n < N; n++) {
                const uint4 x = *(const uint4*)(tokens + 8 * n * stride + 64 * (run + k));
                mma(sums[n], a.x, b.x, a.y, b.y, x.x, x.y);
                mma(sums[n], a.z, b.z, a.w, b.w, x.z, x.w);
            }
        }
    }
}

// `sums += stage at `place` x tokens`, for N times eight tokens. `tokens` points to the stage's first columns of this lane's first token.
template <int N, int MOST> __device__ __forceinline__ void multiply_stage(
    float (&sums)[MOST][4], const Fragments& own, int place, const u8* tokens, int stride
) {
    if (FORMAT == 0) {
        #pragma unroll
        for (int c = 0; c < 2; c++) {
            const u8* const at = own.rows + place + c * own.other_half;
            const uint4 a = *(const uint4*)at, b = *(const uint4*)(at + 1024);
            #pragma unroll
            for (int n = 0; n < N; n++) {
                const uint4 v = *(const uint4*)(tokens + 8 * n * stride + c * (2 * CHUNK));
                mma(sums[n], a.x, b.x, a.y, b.y, v.x, v.y);
                mma(sums[n], a.z, b.z, a.w, b.w, v.z, v.w);
            }
        }
    } else if (FORMAT == 1) {
        float part[N][4] = {};
        #pragma unroll
        for (int c = 0; c < 2; c++) {
            const u8* const at = own.rows + place + c * own.other_half;
            const uint4 a = *(const uint4*)at, b = *(const uint4*)(at + 1024);
            #pragma unroll
            for (int n = 0; n < N; n++) {
                const u8* const token = tokens + 8 * n * stride + c * (2 * CHUNK);
                const uint4 columns[2] = {*(const uint4*)token, *(const uint4*)(token + 16)};
                multiply_e4m3(part[n], a, b, columns);
            }
        }
        const float low = *(const float*)(own.low_scale + place), high = *(const float*)(own.high_scale + place);
        #pragma unroll
        for (int n = 0; n < N; n++) add_scaled(sums[n], part[n], low, high);
    } else if (FORMAT == 3) {
        multiply_int4<N>(sums, own, place, tokens, stride);
    } else {
        #pragma unroll
        for (int group = 0; group < 8; group += 2) {
            const uint4 v = matrices(own.group_rows + place + group * 128);
            const u32 words[4] = {v.x, v.y, v.z, v.w};
            #pragma unroll
            for (int k = 0; k < 2; k++) {
                const float low = group_factor(own.low_scale[place + group + k]), high = group_factor(own.high_scale[place + group + k]);
                const uint2 a = widen_first_e2m1(words[2 * k]), b = widen_first_e2m1(words[2 * k + 1]);
                const uint2 c = widen_second_e2m1(words[2 * k]), d = widen_second_e2m1(words[2 * k + 1]);
                #pragma unroll
                for (int n = 0; n < N; n++) {
                    const uint4 x = *(const uint4*)(tokens + 8 * n * stride + 64 * (group + k));
                    float part[4] = {};
                    mma(part, a.x, b.x, a.y, b.y, x.x, x.y);
                    mma(part, c.x, d.x, c.y, d.y, x.z, x.w);
                    add_scaled(sums[n], part, low, high);
                }
            }
        }
    }
}
