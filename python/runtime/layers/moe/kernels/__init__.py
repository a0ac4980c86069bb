"""Kernels of sparse MLPs: routing, experts for few rows, experts for many rows."""
