"""The workshop: what models are built from."""
