"""Quantisation schemes: how a linear layer stores its weight and multiplies by it."""
