"""The load generator of `python -m runtime.bench_serving`. It uses only HTTP and imports no engine code."""
