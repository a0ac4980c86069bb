"""The front door: processes, HTTP, and the offline engine."""
