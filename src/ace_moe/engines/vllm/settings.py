"""What the user asked of the server: the `ace` part of vLLM's additional_config, checked, and the plan it names."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from ...checkpoint import MoEModel
from ...decider.settings import Skip, check_tables, policy_for
from ...decider.tracking import Control, look_up
from ...errors import IntegrationError, OptionError, PolicyError, brief
from ...plan import Plan
from ...plan.hub import load_plan
from ...policies import AUTO, Policy, choose
from ...tables import TABLES
from ...tables.build import add_tables, automatic_plan
from . import KEY

logger = logging.getLogger("vllm.ace_moe")
# flags of vLLM's under which skipping would be wrong or silent
REFUSED = {
    "--enable-lora": "LoRA aligns all routed slots itself",
    "--enable-dbo": "dual batch overlap splits a step in two",
    "--ubatch-size": "microbatches are parts of a step, and what each token is goes by its place in the whole",
    "--kv-sharing-fast-prefill": "the last layers are given a prompt's last token alone, and cannot tell which it is",
    "--enable-sleep-mode": "an engine that sleeps gives up the memory in which thresholds and counters lie",
    "--enable-return-routed-experts": "it stores ids in unsigned bytes, where a skipped slot has none",
}
EXECUTORS = ("auto", "native", "redirect")  # native: also what was read in vLLM's source and not tried on a GPU
# top-k and rule in one kernel of ours where it knows the router (GPU), or vLLM's own top-k and then the rule
ROUTINGS = ("fused", "vllm")
EVERY = sys.maxsize  # tokens: our kernels run steps of any size
TRACED = 16384
TRIED = ("0.32", "0.33")  # releases of vLLM


def unknown_vllm(error: Exception) -> IntegrationError:
    """What we hook into is not where it was."""
    import vllm

    return IntegrationError(
        f"ACE does not know this vLLM ({vllm.__version__}): {brief(error)}. It was tried with {' and '.join(TRIED)}; install "
        "one of these, or serve without `ace`."
    )


def batch_invariant() -> bool:
    """Whether vLLM was asked that a token's result does not depend on its batch."""
    return os.environ.get("VLLM_BATCH_INVARIANT", "0") not in ("", "0")


@dataclass(frozen=True)
class Settings:
    """`policy_settings` holds gain, min_active, min_mass and the policy's own parameters."""

    plan: str | None = None
    skip: Skip = 0.0
    policy: str | Policy = AUTO
    preset: str | None = None
    workload: str | None = None
    allow_other_weights: bool = False
    kernels: bool | int | str = "auto"
    executor: str = "auto"
    routing: str = "fused"
    restore: bool | None = None  # None: unless vLLM is to be batch-invariant
    track: bool = False
    skip_max: float | None = None  # with target_tpot: how far the budget may rise under load
    target_tpot: float | None = None  # milliseconds
    trace: str | None = None  # a file for what the routers say of the first `trace_tokens` tokens
    trace_tokens: int = TRACED
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
        if self.kernels != "auto" and not (isinstance(self.kernels, int) and self.kernels >= 0):
            raise OptionError(
                f'`kernels` is "auto", true, false or the largest number of tokens for our kernels, not {self.kernels!r}.'
            )
        if not isinstance(self.workload, str | None):
            raise OptionError(f"`workload` is the name of a text, not {self.workload!r:.60}.")
        for name in ("restore", "track", "allow_other_weights"):
            given = getattr(self, name)
            if given is not None and not isinstance(given, bool):
                raise OptionError(f"`{name}` is true or false, not {given!r:.60}.")
        check_valve(self.skip, self.skip_max, self.target_tpot)
        count = self.trace_tokens
        if not isinstance(self.trace, str | None) or not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise OptionError(
                f"`trace` is a file and `trace_tokens` a number from 1 on, not {self.trace!r:.60}, {count!r:.60}."
            )

    @property
    def control(self) -> Control:
        return "track" if self.track else "fixed"

    def check_budgets(self, plan: Plan, policy: Policy) -> None:
        """Whether the plan has thresholds for what may be asked of the engine."""
        for budget in (self.skip, *([] if self.skip_max is None else [self.skip_max])):
            look_up(plan, policy, budget, self.workload, self.control)

    def chosen(self, plan: Plan | None = None, served: bool = True) -> Policy:
        """The policy, which a plan may choose; one that can be served."""
        if plan is None:
            policy = choose(self.policy, self.preset, **self.policy_settings)
        else:
            policy = policy_for(plan, self.policy, self.preset, self.workload, served=served, **self.policy_settings)
        if served:
            check_policy(policy)
        return policy

    @property
    def fuses(self) -> bool:
        """A trace needs what the router said, which the fused kernel does not give away."""
        return self.routing == "fused" and self.trace is None

    @property
    def kernel_tokens(self) -> int:
        """Up to how many tokens our kernels run the experts, where they can."""
        return EVERY if self.kernels == "auto" or self.kernels is True else int(self.kernels)

    def open(self, model: str | Path | None, served: bool = True) -> tuple[Plan, Policy]:
        """The plan and the policy, checked; same errors and words as in transformers. Tables it lacks are made from the
        checkpoint's weights, where that is known. `served`: False where transformers runs it, which can do more."""
        self.chosen(served=served)  # what cannot be served is said before tables are computed
        plan = load_plan(self.plan) if self.plan or model is None else automatic_plan(model)  # type: ignore[arg-type]
        policy = self.chosen(plan, served)
        if model is None:
            check_tables(plan, policy, set())
            return plan, policy
        check_tables(plan, policy, set(TABLES))
        if not self.plan:
            return automatic_plan(model, policy.tables), policy
        if plan.lacks(policy.tables) and self.allow_other_weights:  # or adding to the plan would be refused
            plan = plan.check_model(MoEModel.open(model).fingerprint(), allow_other_weights=True)
        return add_tables(plan, policy.tables, model), policy


def check_valve(skip: object, most: object, target: object) -> None:
    """Both or none, and bounds that leave room."""
    if most is None and target is None:
        return
    if most is None or target is None:
        raise OptionError(
            "--skip-max and --target-tpot go together: how far the budget may rise, and the milliseconds it is for."
        )
    if isinstance(skip, Mapping):
        raise OptionError("--skip-max works with one budget for all phases.")
    numbers = all(isinstance(x, (int, float)) and not isinstance(x, bool) for x in (most, target))
    if not numbers or not float(skip) < float(most) < 1 or not 0 < float(target) < 1e6:  # type: ignore[arg-type]
        raise OptionError(
            f"--skip-max is a budget above --skip ({skip}) and below 1, --target-tpot a time in milliseconds; "
            f"not {most!r}, {target!r}."
        )


def settings_of(vllm_config: Any) -> Settings | None:
    """What an engine was asked for, before its layers are built or after; None for an engine without ACE."""
    given = getattr(vllm_config, "additional_config", None)
    if hasattr(given, "skipping"):
        return given.skipping.settings  # type: ignore[union-attr]
    found = given.get(KEY) if isinstance(given, Mapping) else None
    return Settings.from_dict(found) if isinstance(found, Mapping) else None


def check_policy(policy: Policy) -> None:
    """Only methods that decide a token by its gates and tables can be served: batches there mix requests."""
    if policy.servable:
        return
    raise PolicyError(
        f"Policy {policy.key!r} cannot be served: it looks at more than a token's gates and tables, such as its batch, router "
        "logits or expert outputs. Policies ace, gsp, rcr, share and other token policies can."
    )


def check_content(plan: Plan, model: str | Path, allow_other_weights: bool) -> None:
    """Refuse a plan made from other weights than the checkpoint's. Reads its router rows and a few of its experts'."""
    if allow_other_weights:
        logger.warning("ACE: the plan may be of other weights than the model's (allow_other_weights).")
        return
    plan.check_model(MoEModel.open(model).fingerprint())


def refuse_unsupported(vllm_config: Any, traced: bool = False) -> None:
    """Options of vLLM under which skipping would be wrong or silent."""
    parallel, cache = vllm_config.parallel_config, getattr(vllm_config, "cache_config", None)
    switches = {
        "--enable-lora": vllm_config.lora_config is not None,
        "--enable-dbo": getattr(parallel, "enable_dbo", False),
        "--ubatch-size": getattr(parallel, "ubatch_size", 0) > 1,
        "--kv-sharing-fast-prefill": getattr(cache, "kv_sharing_fast_prefill", False),
        "--enable-sleep-mode": getattr(vllm_config.model_config, "enable_sleep_mode", False),
        "--enable-return-routed-experts": getattr(vllm_config.model_config, "enable_return_routed_experts", False),
    }
    reasons = (
        *((on, REFUSED[flag], flag) for flag, on in switches.items()),
        (
            traced and getattr(getattr(vllm_config, "speculative_config", None), "enable_adaptive_verification", False),
            "it keeps from the host how many tokens of a request a step computes, which a trace writes down",
            "adaptive verification (enable_adaptive_verification) while it traces",
        ),
        (
            getattr(parallel, "prefill_context_parallel_size", 1) > 1,
            "prefill context parallelism gathers tokens before they are routed",
            "--prefill-context-parallel-size",
        ),
    )
    for wrong, why, flag in reasons:
        if wrong:
            raise IntegrationError(f"ACE does not work with {flag}: {why}. Serve without {flag}, or without `ace`.")
