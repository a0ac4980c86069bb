"""Tokens and text: tokenizer and chat templates."""
