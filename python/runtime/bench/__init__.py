"""The load generator behind `python -m runtime.bench_serving`: it knows servers by HTTP alone and imports no engine
code.
"""
