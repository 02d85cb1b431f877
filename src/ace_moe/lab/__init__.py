"""The half that measures and chooses: comparisons, tuning, tasks, benchmarks, traffic, reports. Nothing that runs imports it."""
