"""Running only the kept slots."""
