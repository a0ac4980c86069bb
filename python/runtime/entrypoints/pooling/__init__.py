"""Endpoints for embeddings, scores and ranks."""
