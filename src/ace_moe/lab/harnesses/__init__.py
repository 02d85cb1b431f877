"""Evaluation harnesses with skipping: lm-eval and EvalScope."""
