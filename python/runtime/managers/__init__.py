"""The office: the processes that speak ZMQ; no torch."""
