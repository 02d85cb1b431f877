"""Errors of our own: each message says what is wrong and what to do about it."""


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
