"""What the APIs share: connections, limits, keys, request bodies, answers and streams."""
