"""The parts of models: linears, norms, attention, MLPs, sampling, and their kernels."""
