"""The HTTP application and its start and stop: the routes of every API, administration and the OpenAPI description."""
