"""The KV cache: pools, pages and cached prefixes."""
