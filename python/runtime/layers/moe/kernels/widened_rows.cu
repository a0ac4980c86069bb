// Prepares the rows of x for `widened_experts.cu`, one for each of the sorted pairs: converts bfloat16 to float16, scaled by a power of two chosen by
// the row's largest entry, and puts the even columns of each 16 before the odd ones. One warp per place of the tiles.
//
// Defined before this text: SORTED, THREADS, grouped_parts.cu, and the rest of `fragments.cu`.

// x: [T, width], width a multiple of 16, or with SORTED [places, width], whose columns are in order already; rows: [places, width], of which only
// those of pairs are written. factors[row] undoes the scaling of the row.
extern "C" __global__ void __launch_bounds__(THREADS) widened_rows(
    const uint4* x, const Tiles tiles, uint4* rows, float* factors, int places, int width, int tile_rows, int top_k
) {
    constexpr int HELD = 6;  // pieces of 16 columns that a lane keeps in registers; it reads further ones twice
    if (EARLY) launch_next(), wait_for_previous();
    const int place = blockIdx.x * (THREADS / 32) + threadIdx.x / 32, lane = threadIdx.x % 32, tile = place / tile_rows;
    if (place >= places) return;
    const int used = *tiles.used, count = tiles.places[2 * tile + 1], pair = tiles.pairs[place];  // on their way together
    if (tile >= used || place % tile_rows >= count) return;
    const int pieces = width / 16;
    const uint4* const from = x + (long)(SORTED ? place : pair / top_k) * pieces * 2;
    uint4 held[HELD][2];
    u32 most = 0;
#pragma unroll
    for (int i = 0; i < HELD; i++) {
        const int piece = i * 32 + lane;
        held[i][0] = piece < pieces ? from[2 * piece] : make_uint4(0, 0, 0, 0);
        held[i][1] = piece < pieces ? from[2 * piece + 1] : make_uint4(0, 0, 0, 0);
        most = largest8(largest8(most, held[i][0]), held[i][1]);
    }
    for (int piece = HELD * 32 + lane; piece < pieces; piece += 32) most = largest8(largest8(most, from[2 * piece]), from[2 * piece + 1]);
    const int base = base_of(largest_of_warp(max(most & 0xFFFF, most >> 16)));
    uint4* const to = rows + (long)place * pieces * 2;
    const auto put = [&](int piece, uint4 first, uint4 second) {
        const uint4 a = narrow8(first, base), b = narrow8(second, base);
        if (SORTED) {
            to[2 * piece] = a, to[2 * piece + 1] = b;
            return;
        }
        to[2 * piece] = make_uint4(
            __byte_perm(a.x, a.y, 0x5410), __byte_perm(a.z, a.w, 0x5410), __byte_perm(b.x, b.y, 0x5410), __byte_perm(b.z, b.w, 0x5410)
        );
        to[2 * piece + 1] = make_uint4(
            __byte_perm(a.x, a.y, 0x7632), __byte_perm(a.z, a.w, 0x7632), __byte_perm(b.x, b.y, 0x7632), __byte_perm(b.z, b.w, 0x7632)
        );
    };
#pragma unroll
    for (int i = 0; i < HELD; i++) {
        const int piece = i * 32 + lane;
        if (piece < pieces) put(piece, held[i][0], held[i][1]);
    }
    for (int piece = HELD * 32 + lane; piece < pieces; piece += 32) put(piece, from[2 * piece], from[2 * piece + 1]);
    if (lane == 0) factors[place] = __uint_as_float((u32)(base + 15) << 23);
}
