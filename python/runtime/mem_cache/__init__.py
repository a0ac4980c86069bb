"""The cellar: KV slots, pages and cached prefixes."""
