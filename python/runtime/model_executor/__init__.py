"""The engine room: weights, graphs and device state."""
