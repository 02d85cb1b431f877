"""Errors of our own: each message says what is wrong and what to do about it."""

BUILD = "`ace plan MODEL -o FILE`"  # the command that makes a plan, as messages name it


class AceError(Exception):
    """Base of every error this package raises on purpose."""


class CheckpointError(AceError):
    """A checkpoint cannot be read: missing or truncated file, no MoE, unsupported format."""


class StructureError(AceError):
    """A model is built in a way the tables or the rule have no meaning for."""


class ModelError(AceError):
    """A running model gives no usable numbers."""


class DeviceError(AceError):
    """A device is not there or has no room."""


class PlanError(AceError):
    """A plan file is damaged, of another schema, or of another model."""


class PolicyError(AceError):
    """A policy, preset or one of their settings is unknown, out of range or not usable here."""


class BudgetError(AceError):
    """A budget or threshold cannot be met or has no entry yet."""


class TextError(AceError):
    """A text cannot serve as workload: empty, too short, wrong tokenizer."""


class TaskError(AceError):
    """Questions of a task are missing or damaged."""


class OptionError(AceError):
    """An option or argument has a value that means nothing."""


class OutputError(AceError):
    """A file cannot be written where it should go."""


class ResultError(AceError):
    """A results file is damaged, of another kind, or of another measurement."""


class TraceError(AceError):
    """A trace is damaged, of another model, or lacks what is asked of it."""


class IntegrationError(AceError):
    """A model or engine cannot be attached, or skipping could not take effect."""


def no_numbers(what: str) -> ModelError:
    return ModelError(
        f"The model gives {what} that are not numbers (NaN). Its weights are damaged or its precision is too low for them; "
        "download it again, or load it in bfloat16 or float32."
    )


def out_of_reach(budget: float, limit: float, where: str) -> BudgetError:
    """Of a budget above what safeguards leave to skip; `where`: "on this text"."""
    return BudgetError(
        f"A budget of {budget:.1%} cannot be met: the safeguards protect all but {limit:.1%} of the slots {where}. "
        "Lower the budget, min_active or min_mass."
    )


def brief(error: BaseException) -> str:
    """The first line of another library's error, for the middle of a sentence of ours."""
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__
