"""What the user asked of the server: the `ace` part of vLLM's additional_config, checked, and the plan it names."""

from __future__ import annotations

import hashlib
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from ...budget import NONE, Budget
from ...checkpoint import MoEModel
from ...decider.thresholds import Control, Thresholds, thresholds_for
from ...errors import IntegrationError, OptionError, PlanError, PolicyError, brief
from ...plan import Lookup, Plan
from ...plan.hub import load_plan
from ...policies import AUTO, Policy, choose, policy_for
from ...tables.build import add_tables, automatic_plan, check_tables
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
    """The error for a vLLM in which something we hook into is missing."""
    import vllm

    return IntegrationError(
        f"ACE does not know this vLLM ({vllm.__version__}): {brief(error)}. It was tried with {' and '.join(TRIED)}; install "
        "one of these, or serve without `ace`."
    )


def batch_invariant() -> bool:
    """Ask whether vLLM keeps a token's result independent of its batch."""
    return os.environ.get("VLLM_BATCH_INVARIANT", "0") not in ("", "0")


@contextmanager
def plain_torch() -> Iterator[None]:
    """Read checkpoints and plans in fp32 on the CPU: vLLM builds layers under the model's own default type and device."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.device("cpu"):
            yield
    finally:
        torch.set_default_dtype(before)


@dataclass(frozen=True)
class Settings:
    """The checked `ace` part of a configuration; `policy_settings` holds gain, min_active, min_mass and the policy's own."""

    plan: str | None = None
    plan_sha256: str | None = None  # of the plan file's bytes: every process of a server reads the same ones
    skip: Budget = NONE
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
        """Parse JSON. A key that is not a setting of the server goes to the policy, which refuses what it does not know."""
        if not isinstance(given, Mapping):
            raise OptionError(
                f"The `ace` part of additional_config is {given!r:.60}; it must be an object such as "
                '{"plan": "plan.safetensors", "skip": 0.5}.'
            )
        names = {f.name for f in fields(cls)} - {"policy_settings"}
        own = {k: v for k, v in given.items() if k in names}
        own["skip"] = Budget.parse(own.get("skip", NONE))
        settings = cls(**own, policy_settings={k: v for k, v in given.items() if k not in names})
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
        if not isinstance(self.plan_sha256, str | None):
            raise OptionError(f"`plan_sha256` is the sha256 of the plan file, not {self.plan_sha256!r:.60}.")
        if not isinstance(self.workload, str | None):
            raise OptionError(f"`workload` is the name of a text, not {self.workload!r:.60}.")
        for name in ("restore", "track", "allow_other_weights"):
            given = getattr(self, name)
            if given is not None and not isinstance(given, bool):
                raise OptionError(f"`{name}` is true or false, not {given!r:.60}.")
        check_load(self.skip, self.skip_max, self.target_tpot)
        count = self.trace_tokens
        if not isinstance(self.trace, str | None) or not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise OptionError(
                f"`trace` is a file and `trace_tokens` a number from 1 on, not {self.trace!r:.60}, {count!r:.60}."
            )

    @property
    def control(self) -> Control:
        return "track" if self.track else "fixed"

    def lookup(self, plan: Plan, policy: Policy, budget: Budget, workload: str | None = None) -> Thresholds:
        """τ by phase for a budget, on the server's text or another."""
        lookup = Lookup(plan, policy.settings, workload or self.workload)
        return thresholds_for(lookup, budget.check(plan.top_k, policy.min_active), self.control)

    @property
    def budgets(self) -> list[Budget]:
        """What the server itself may run under: its budget, and how far that may rise."""
        return [self.skip, *([] if self.skip_max is None else [Budget.parse(self.skip_max)])]

    def check_budgets(self, plan: Plan, policy: Policy) -> None:
        """Refuse a plan without thresholds for the server's budgets."""
        for budget in self.budgets:
            self.lookup(plan, policy, budget)

    def chosen(self, plan: Plan | None = None) -> Policy:
        """The policy that is meant, which a plan may choose; refused if it cannot be served."""
        if plan is None:
            policy = choose(self.policy, self.preset, **self.policy_settings)
        else:
            policy = policy_for(plan, self.policy, self.preset, self.workload, served=True, **self.policy_settings)
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

    @plain_torch()
    def read(self, model: str | Path) -> Plan:
        """The plan as its file holds it; where none is named, the one that is kept for this model."""
        if self.plan is None:
            return automatic_plan(model)
        return load_plan(self.plan) if self.plan_sha256 is None else read_agreed(self.plan, self.plan_sha256)

    @plain_torch()
    def open(self, model: str | Path) -> tuple[Plan, Policy]:
        """The plan and the policy, checked; tables that the policy reads and the plan lacks are made from the weights."""
        self.chosen()  # what cannot be served is said before tables are computed
        plan = self.read(model)
        policy = self.chosen(plan)
        check_tables(plan, policy)
        if self.plan is None:
            return automatic_plan(model, policy.tables), policy
        if plan.lacks(policy.tables) and self.allow_other_weights:  # or adding to the plan would be refused
            plan = plan.check_model(MoEModel.open(model).fingerprint(), allow_other_weights=True)
        return add_tables(plan, policy.tables, model), policy


# ---- the plan's file ------------------------------------------------------------------------------------------------


def file_hash(path: str | Path) -> str:
    """sha256 of a plan file's bytes, by which the processes of a server agree on it."""
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError as error:
        raise PlanError(
            f"There is no plan at {path} that can be read ({error.strerror or error}). Check the path."
        ) from error


@lru_cache(maxsize=4)
def read_agreed(path: str, sha256: str) -> Plan:
    """The plan of a server, read once in each of its processes: the bytes that its front end saw, or an error."""
    before, plan = file_hash(path), load_plan(path)
    if {before, file_hash(path)} != {sha256}:  # twice: another command may replace the file in between
        raise PlanError(
            f"{path} is not the plan that this server was started with: it was changed in between. Start the server again."
        )
    return plan


# ---- what is refused ------------------------------------------------------------------------------------------------


def check_load(skip: Budget, most: object, target: object) -> None:
    """Refuse a target time without room for the budget to rise, and room without a target."""
    if most is None and target is None:
        return
    if most is None or target is None:
        raise OptionError(
            "--skip-max and --target-tpot go together: how far the budget may rise, and the milliseconds it is for."
        )
    if not skip.uniform:
        raise OptionError("--skip-max works with one budget for all phases.")
    numbers = all(isinstance(x, (int, float)) and not isinstance(x, bool) for x in (most, target))
    if not numbers or not skip.decode < float(most) < 1 or not 0 < float(target) < 1e6:  # type: ignore[arg-type]
        raise OptionError(
            f"--skip-max is a budget above --skip ({skip}) and below 1, --target-tpot a time in milliseconds; "
            f"not {most!r}, {target!r}."
        )


def settings_of(vllm_config: Any) -> Settings | None:
    """The settings of an engine, before its layers are built or after; None for an engine without ACE."""
    additional = getattr(vllm_config, "additional_config", None)
    if hasattr(additional, "skipping"):
        return additional.skipping.settings  # type: ignore[union-attr]
    ace = additional.get(KEY) if isinstance(additional, Mapping) else None
    return Settings.from_dict(ace) if isinstance(ace, Mapping) else None


def check_policy(policy: Policy) -> None:
    """Refuse a method that looks at more than a token's gates and tables: batches mix requests here."""
    if policy.by_token:
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
