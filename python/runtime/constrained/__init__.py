"""Grammars: what the output of a request may be, compiled and followed token by token. No torch."""
