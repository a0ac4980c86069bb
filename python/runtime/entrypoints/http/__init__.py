"""The HTTP server: connections, limits, keys, request bodies, streams and administration."""
