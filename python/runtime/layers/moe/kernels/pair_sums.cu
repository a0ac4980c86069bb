// out[token] (+)= the sum over the token's pairs that this process computed. With DEFER also out * gain, and the sum of squares of each 16 columns.
//
// Constants from the host besides those of `fragments.cu`: TOP_K, ADD, DEFER, FLOAT_OUT, THREADS.

// A thread sums four columns of a token; `columns` is a multiple of 16.
extern "C" __global__ void __launch_bounds__(THREADS) pair_sums(
    const float* y, Routing routing, void* out, const u16* gain, u16* scaled, float* squares, int columns
) {
    const int blocks = (columns + 4 * THREADS - 1) / (4 * THREADS), token = blockIdx.x / blocks;
    const int column = (blockIdx.x % blocks * THREADS + threadIdx.x) * 4;
    const bool in = column < columns;
    const long at = (long)token * columns + column;
    bool held[TOP_K];
    if (EARLY) launch_next(), wait_for_previous();
    #pragma unroll
    for (int j = 0; j < TOP_K; j++) {
        const int id = routing.ids[token * TOP_K + j] - routing.first;
        held[j] = id >= 0 && id < routing.experts;
    }
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f), part[TOP_K];
    #pragma unroll
    for (int j = 0; j < TOP_K; j++)
        part[j] = in && held[j] ? *(const float4*)(y + (long)(token * TOP_K + j) * columns + column) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (ADD && in && FLOAT_OUT) sum = *(const float4*)((const float*)out + at);
    if (ADD && in && !FLOAT_OUT) {
        const u16* before = (const u16*)out + at;
        sum = make_float4(of_bf16(before[0]), of_bf16(before[1]), of_bf16(before[2]), of_bf16(before[3]));
    }
    #pragma unroll
    for (int j = 0; j < TOP_K; j++) sum.x += part[j].x, sum.y += part[j].y, sum.z += part[j].z, sum.w += part[j].w;
    if (in && FLOAT_OUT) *(float4*)((float*)out + at) = sum;
    if (in && !FLOAT_OUT) *(ushort4*)((u16*)out + at) = make_ushort4(to_bf16(sum.x), to_bf16(sum.y), to_bf16(sum.z), to_bf16(sum.w));
    if (DEFER) {
        const float square = sum_of_four(sum.x * sum.x + sum.y * sum.y + sum.z * sum.z + sum.w * sum.w);
        if (in) {
            const ushort4 scale = *(const ushort4*)(gain + column);
            *(ushort4*)(scaled + at) = make_ushort4(
                to_bf16(sum.x * of_bf16(scale.x)), to_bf16(sum.y * of_bf16(scale.y)), to_bf16(sum.z * of_bf16(scale.z)),
                to_bf16(sum.w * of_bf16(scale.w)));
            if (column % 16 == 0) squares[at / 16] = square;
        }
    }
}
