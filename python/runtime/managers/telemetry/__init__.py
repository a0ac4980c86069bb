"""Statistics, metrics and heartbeats of the managers."""
