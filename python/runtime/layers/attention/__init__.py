"""Attention backends with one interface."""
