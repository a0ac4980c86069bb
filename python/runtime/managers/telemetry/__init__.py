"""Counts and heartbeats of the managers."""
