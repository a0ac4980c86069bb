"""The load generator of `python -m runtime.bench_serving`. It uses only HTTP; chat templates alone need code of the server."""
