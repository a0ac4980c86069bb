"""Anthropic's endpoints."""
