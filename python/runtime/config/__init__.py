"""Flags, the resolved configuration, and facts about machine, device and model."""
