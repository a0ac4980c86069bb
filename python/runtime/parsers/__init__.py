"""Parsers that turn the model's output into typed deltas: content, reasoning and tool calls."""
