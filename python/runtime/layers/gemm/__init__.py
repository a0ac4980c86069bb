"""GEMM kernels, their epilogues and autotuning."""
