// Structs that the grouped GEMMs of experts share, in addition to `gemm/wgmma_parts.cu`.

struct Tiles { const int *pairs, *experts, *places, *used; };  // align.py: the sorted pairs
struct Gate { float alpha, limit; };                           // gate.py
