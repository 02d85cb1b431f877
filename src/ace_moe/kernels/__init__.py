"""Triton code and what launches it: the rule, routing, sorting, the experts, decode attention."""
