"""The HTTP application: its start and stop, all routes, administration and the OpenAPI description."""
