"""The model's output as typed deltas: content, reasoning and tool calls."""
