"""Parallel groups: which part of a model this process computes, and how parts are combined."""
