"""Latency: time to first token and time per output token, skipped and unskipped, in one run."""
