"""Fetches, reads and converts model files, without torch."""
