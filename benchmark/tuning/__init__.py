"""Tools that select kernel configurations; they need a GPU and produce no table of the documentation.

Run a tool after a change to a kernel, with a new version of Triton, or on another kind of GPU, and check that the constants it names are
still the fastest. Results go to `results/MACHINE/tuning/`.

    PYTHONPATH=python python -m benchmark.tuning.TOOL

- `gemms`: all configurations of the Triton GEMM; the fastest belong in config/device_tuning.py.
- `experts`: tilings of the kernels of sparse layers; the fastest belong in config/expert_tuning.py.
- `scaled_gemms`: GEMMs with FP8 weights and with bfloat16; the fastest belong in config/device_tuning.py.
- `split_attention`: configurations of split-KV attention compared with FA3, for the default configuration and the batch sizes at which it
  is used.
- `latent_attention`: configurations of split-KV attention over latent rows compared with the cluster kernel and FA3.
- `attention_backends`: one pass of each attention backend by page size.
- `decode_step`: a whole step of 32 layers and the head, with one kind of kernel omitted at a time, to see whether a faster kernel makes the
  step faster.
- `step_choices`: the kernels that autotuning timed for each GEMM, alone and within a decode pass.

All tools time graphs. They use the sizes of Llama-3-8B (`world`), except `experts` and `scaled_gemms`, which have their own shapes.
"""
