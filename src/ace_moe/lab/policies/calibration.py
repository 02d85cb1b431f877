"""Tables that need a running model: which method makes them, and the plan that carries them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict

from transformers import PreTrainedModel

from ...checkpoint import MoEModel
from ...plan import Plan
from ...policies import Policy, Tables
from ...tables.build import add_tables
from ...text import Windows
from . import learned, oracle, sere, signature
from .allocation import AllocL, Lexi
from .diep import Diep
from .expert_sparsity import ExpertSparsity

CALIBRATIONS: dict[str, Callable[..., Tables]] = {  # of (policy, model, windows), by the table they make
    "naee_median": learned.medians,
    "modes_alpha": learned.alphas,
    "reap_saliency": learned.saliencies,
    "oracle_scale": oracle.scales,
    "sere_similarity": sere.similarities,
    "sere_weights": signature.similarities,
    "alloc_l_slots": AllocL.calibrate,
    "lexi_slots": Lexi.calibrate,
    "diep_order": Diep.calibrate,
    "expert_sparsity_pruned": ExpertSparsity.calibrate,
}


def calibrated(policy: Policy) -> bool:
    """Whether the policy reads a table that a running model makes."""
    return any(name in CALIBRATIONS for name in policy.needs)


def calibrate(policy: Policy, model: PreTrainedModel, windows: Windows | None) -> Tables:
    """The policy's table that needs a running model, by layer. The model is left as it was."""
    (make,) = (CALIBRATIONS[name] for name in policy.needs if name in CALIBRATIONS)
    return make(policy, model, windows)


def prepare(plan: Plan, policy: Policy, model: PreTrainedModel, windows: Windows | None) -> Plan:
    """The plan with every table the policy reads: what it lacks is computed from weights or calibrated on this text."""
    plan = add_tables(plan, policy.tables, model)
    if not calibrated(policy) or not plan.lacks(policy.needs):
        return plan
    plan.check_model(MoEModel.of(model).fingerprint())
    made = {"params": policy.params, "workload": None if windows is None else asdict(windows.workload)}
    return plan.with_tables(calibrate(policy, model, windows), made)
