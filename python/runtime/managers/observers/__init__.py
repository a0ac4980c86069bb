"""Observers of the TokenizerManager's requests: metrics and the request log."""
