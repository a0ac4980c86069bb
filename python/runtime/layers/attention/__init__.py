"""Attention backends behind one contract."""
