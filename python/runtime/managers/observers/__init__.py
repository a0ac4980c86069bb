"""What watches the requests of the TokenizerManager: metrics and the log of requests that ended."""
