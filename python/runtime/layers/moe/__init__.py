"""Sparse MLPs: a router, the experts it chooses from, and experts that every token runs through."""
