"""The scripts that measure the documentation's results; run them as `python -m benchmark.NAME` from the project's root.

`report.SCRIPTS` lists the scripts that produce a table; with `--quick` they run on any machine. `tuning` has tools for tuning kernels.
"""
