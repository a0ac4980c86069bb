"""Process supervision, the HTTP server, and the offline engine."""
