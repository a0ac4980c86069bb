"""Model files on disk: fetching, reading and converting them, without torch."""
