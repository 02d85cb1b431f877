"""Errors of our own: each message says what is wrong and what to do about it."""

import os
from pathlib import Path


class AceError(Exception):
    """Base of every error this package raises on purpose."""


class CheckpointError(AceError):
    """A checkpoint cannot be read: missing or truncated file, no MoE, unsupported format."""


class StructureError(AceError):
    """A model is built in a way the tables or the rule have no meaning for."""


class PlanError(AceError):
    """A plan file is damaged, of another schema, or of another model."""


class BudgetError(AceError):
    """A budget cannot be met or has no threshold yet."""


class TextError(AceError):
    """A text cannot serve as workload: empty, too short, wrong tokenizer."""


class IntegrationError(AceError):
    """A model cannot be attached, or skipping could not take effect."""


def expand(path: str | Path) -> Path:
    """`~` as the home folder. A user that does not exist stays as typed, so that "there is no file" follows."""
    return Path(os.path.expanduser(path))


def brief(error: BaseException) -> str:
    """The first line of another library's error, for the middle of a sentence of ours."""
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__
