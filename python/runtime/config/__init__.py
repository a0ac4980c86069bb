"""Flags, the resolved configuration, and what is known of machine, device and model."""
