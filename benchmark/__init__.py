"""Every figure of the README comes from a script here; run them as `python -m benchmark.NAME` from the project's root.

Those that make a table stand in `report.SCRIPTS` and run anywhere with `--quick`; tools by which kernels are tuned are in `tuning`.
"""
