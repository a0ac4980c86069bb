"""Endpoints that answer with numbers: embeddings, scores and ranks."""
