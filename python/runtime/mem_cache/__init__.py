"""KV pools, pages and cached prefixes."""
