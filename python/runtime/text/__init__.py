"""The tokenizer and chat templates."""
