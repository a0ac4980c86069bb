"""The scripts behind the figures of the documentation; run them as `python -m benchmark.NAME` from the project's root.

`report.SCRIPTS` lists the scripts that make a table; they run anywhere with `--quick`. `tuning` holds tools that tune
kernels.
"""
