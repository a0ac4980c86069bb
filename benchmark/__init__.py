"""Every figure of the README comes from a script here; run them as `python -m benchmark.NAME` from the project's root."""
