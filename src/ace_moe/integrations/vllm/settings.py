"""What the user asked of the server: the `ace` part of vLLM's additional_config, checked, and the plan it names."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from ...ace import ACE, Skip
from ...checkpoint import MoEModel
from ...errors import OptionError, OutputError, PolicyError
from ...plan import Plan
from ...policies import Policy, TokenPolicy

logger = logging.getLogger("vllm.ace_moe")
EXECUTORS = ("auto", "redirect")
# top-k and rule in one kernel of ours where it knows the router (GPU), or vLLM's own top-k and then the rule
ROUTINGS = ("fused", "vllm")
EVERY = sys.maxsize  # tokens: our kernels run steps of any size


@dataclass(frozen=True)
class Settings:
    """`policy_settings` holds gain, min_active, min_mass and the policy's own parameters."""

    plan: str | None = None
    skip: Skip = 0.0
    policy: str = "ace"
    preset: str | None = None
    workload: str | None = None
    allow_other_weights: bool = False
    kernels: bool | int | str = "auto"
    executor: str = "auto"
    routing: str = "fused"
    policy_settings: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_dict(cls, given: object) -> Settings:
        """From JSON. A key that is no setting of the server is taken for one of the policy, which knows its own."""
        if not isinstance(given, Mapping):
            raise OptionError(
                f"The `ace` part of additional_config is {given!r:.60}; it must be an object such as "
                '{"plan": "plan.safetensors", "skip": 0.5}.'
            )
        own = {f.name for f in fields(cls)} - {"policy_settings"}
        settings = cls(
            **{k: v for k, v in given.items() if k in own},
            policy_settings={k: v for k, v in given.items() if k not in own},
        )
        settings._check()
        return settings

    def _check(self) -> None:
        if self.plan is not None and not isinstance(self.plan, str):
            raise OptionError(f"`plan` is the path of a plan file, not {self.plan!r:.60}.")
        if self.executor not in EXECUTORS:
            raise OptionError(f"`executor` is one of {', '.join(EXECUTORS)}, not {self.executor!r}.")
        if self.routing not in ROUTINGS:
            raise OptionError(f"`routing` is one of {', '.join(ROUTINGS)}, not {self.routing!r}.")
        if self.kernels != "auto" and not isinstance(self.kernels, int):
            raise OptionError(
                f'`kernels` is "auto", true, false or the largest number of tokens for our kernels, not {self.kernels!r}.'
            )

    @property
    def fuses(self) -> bool:
        return self.routing == "fused"

    @property
    def kernel_tokens(self) -> int:
        """Up to how many tokens our kernels run the experts, where they can."""
        return EVERY if self.kernels == "auto" or self.kernels is True else int(self.kernels)

    def open(self, model: str | Path) -> ACE:
        """The plan in use: thresholds looked up, policy checked; same errors and words as in transformers."""
        plan = Plan.load(self.plan) if self.plan else automatic_plan(model)
        ace = ACE(
            plan,
            self.skip,
            policy=self.policy,
            preset=self.preset,
            workload=self.workload,
            allow_other_weights=self.allow_other_weights,
            **self.policy_settings,
        )
        check_policy(ace.policy)
        return ace


def check_policy(policy: Policy) -> None:
    """Only methods that decide a token by its gates and tables can be served: batches there mix requests."""
    if isinstance(policy, TokenPolicy) and not policy.needs_logits and not policy.needs_norms:
        return
    why = "it decides by the batch or the sequence, which mix requests in a server"
    if policy.needs_logits or policy.needs_norms:
        why = "it needs router logits or expert outputs beside the gates"
    raise PolicyError(
        f"Policy {policy.name!r} cannot be served: {why}. Policies ace, gsp, rcr, share and other token policies can."
    )


def check_content(plan: Plan, model: str | Path, allow_other_weights: bool) -> None:
    """Refuse a plan made from other weights than the checkpoint's. Reads its router rows, nothing else."""
    if allow_other_weights:
        logger.warning("ACE: the plan may be of other weights than the model's (allow_other_weights).")
        return
    plan.check_model(MoEModel.open(model).fingerprint())


# ---- a plan when none is given ----------------------------------------------------------------------------------


def cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("ACE_CACHE") or Path(base) / "ace-moe")


def automatic_plan_path(model: str | Path) -> tuple[Path, MoEModel]:
    moe = MoEModel.open(model)
    return cache_folder() / f"{moe.name}-{moe.content()[:16]}.safetensors", moe


def automatic_plan(
    model: str | Path, say: Callable[[str], None] = logger.warning, tick: Callable[[], None] = lambda: None
) -> Plan:
    """The model's tables from the cache, or computed and kept there. One process computes, the others wait."""
    from filelock import FileLock

    from ...offline import build_plan

    path, moe = automatic_plan_path(model)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{path}.lock"):
            if not path.exists():
                say(f"ACE: no plan was given; computing the tables of {moe.name} ({len(moe)} layers) into {path}.")
                build_plan(moe, tick=tick).save(path)
            else:
                say(f"ACE: no plan was given; using the one made earlier at {path}.")
    except OSError as error:
        raise OutputError(
            f"A plan could not be kept in {path.parent} ({error.strerror or error}). Make one with `ace tables {model} -o "
            "plan.safetensors` and name it with --plan, or set ACE_CACHE to a folder that can be written."
        ) from error
    return Plan.load(path)
