"""Tools that chose how kernels are cut: each needs a GPU, and makes no table of the README or the docs.

Run one after a change to a kernel, with another version of Triton, or on another kind of GPU, and look whether the constants that it names
are still the fastest ones. Figures go to `results/MACHINE/tuning/`.

    PYTHONPATH=python python -m benchmark.tuning.TOOL

- `products`: every cut of the small matrix product; what `candidate_configs` of layers/gemm_choice.py offers to be timed at start.
- `split_attention`: cuts of split-KV attention beside FA3; `split_kv` and `split_kv_batches` of config/device_tuning.py.
- `attention_backends`: one pass of each attention backend by page size.
- `decode_step`: the whole step of 32 layers and the head, with kernels left out in turn: whether what is faster alone is so in the chain.

All work on Llama-3-8B's sizes (`world`), and time graphs (`clock`).
"""
