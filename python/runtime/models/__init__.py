"""The library: one file a model family."""
