"""Plans that others made: named like a model, `owner/name`, and read like any file."""

from .hub import check_push, load_plan, located, push

__all__ = ["check_push", "load_plan", "located", "push"]
