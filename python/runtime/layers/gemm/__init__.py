"""GEMM kernels, their epilogues and their autotuning."""
