"""The worker: weights, CUDA graphs, memory and device state."""
