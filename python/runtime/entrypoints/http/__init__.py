"""HTTP parts that all APIs share: connections, limits, keys, request bodies, answers and streams."""
