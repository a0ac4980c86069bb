"""Drafters: how drafts are proposed."""
