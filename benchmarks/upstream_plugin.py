"""A pytest plugin for transformers' own tests: a plan on every MoE model they build, and a record of what came out.

`upstream.py` loads it with `-p upstream_plugin --ace-mode 0.5 --ace-out out.json`.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel, set_seed

from ace_moe import ACE, build_plan
from ace_moe.checkpoint import MoEModel
from ace_moe.errors import StructureError

STOCK = "stock"


class Attacher:
    """Attaches a plan to each model once it is whole: when the outermost constructor or `from_pretrained` returns."""

    def __init__(self, skip: float):
        self.skip, self.depth = skip, 0
        self.attached: list[ACE] = []  # by the test that runs now

    def install(self) -> None:
        """From now on; classes that exist already are left alone, so this comes before any modelling file is imported."""
        announce, load = PreTrainedModel.__init_subclass__.__func__, PreTrainedModel.from_pretrained.__func__

        def init_subclass(cls: type[PreTrainedModel], **kwargs: Any) -> None:
            announce(cls, **kwargs)
            cls.__init__ = self.outermost(cls.__init__)

        PreTrainedModel.__init_subclass__ = classmethod(init_subclass)
        PreTrainedModel.from_pretrained = classmethod(self.outermost(load))

    def outermost(self, build: Callable[..., Any]) -> Callable[..., Any]:
        """`build`, and a plan on what it made, unless it runs inside another of these: parts get their model's plan."""

        @functools.wraps(build)
        def wrapper(first: Any, *args: Any, **kwargs: Any) -> Any:
            self.depth += 1
            try:
                built = build(first, *args, **kwargs)
            finally:
                self.depth -= 1
            if self.depth == 0:
                found = first if built is None else built  # a constructor returns nothing
                self.attach(found[0] if isinstance(found, tuple) else found)  # a tuple if loading was asked for details
            return built

        return wrapper

    def attach(self, model: PreTrainedModel) -> None:
        """A plan on a model that has weights and routed experts."""
        whole = getattr(model, "_is_hf_initialized", False) and not any(p.is_meta for p in model.parameters())
        if not whole:  # its memory holds nothing yet: no plan can be made, and it cannot run
            return
        try:
            MoEModel.of(model)
        except StructureError:  # no routed experts
            return
        ace = ACE(build_plan(model), policy="share")
        ace.attach(model)
        # a share is 1/k on average, so about half of the slots lie under 1/k
        ace.set_threshold(2 * self.skip / model.config.get_text_config().num_experts_per_tok)
        self.attached.append(ace)

    def counted(self) -> tuple[int, int]:
        """Slots that were routed and executed in the models of the last test, which are then let go."""
        phases = [ace.report()[phase] for ace in self.attached for phase in ("prefill", "decode")]
        self.attached.clear()
        return sum(p["routed"] for p in phases), sum(p["kept"] for p in phases)


class Recorder:
    """Outcomes of one run of pytest, and how many slots of its models ran."""

    def __init__(self, out: str, attacher: Attacher | None):
        self.out, self.attacher = Path(out), attacher
        self.outcomes: dict[str, str] = {}
        self.reasons: dict[str, str] = {}
        self.skipping, self.routed, self.kept = 0, 0, 0

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """The same weights and inputs with ACE and without: a test that fails by chance fails in both."""
        set_seed(0)
        if (common := sys.modules.get("tests.test_modeling_common")) is not None:
            common.global_rng.seed(0)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test fails if any of its phases or subtests does."""
        name = report.nodeid.partition("::")[2]
        if report.failed:
            self.outcomes[name] = "failed" if report.when == "call" else "error"
            crash = getattr(report.longrepr, "reprcrash", None)
            self.reasons.setdefault(name, crash.message if crash else str(report.longrepr))
        elif name not in self.reasons and (report.when == "call" or report.skipped):
            self.outcomes[name] = report.outcome

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> None:
        routed, kept = self.attacher.counted() if self.attacher else (0, 0)
        self.skipping, self.routed, self.kept = self.skipping + (routed > 0), self.routed + routed, self.kept + kept

    def pytest_sessionfinish(self) -> None:
        realised = 1 - self.kept / self.routed if self.routed else 0.0
        found = {"outcomes": self.outcomes, "reasons": self.reasons, "with_ace": self.skipping, "realised": realised}
        self.out.write_text(json.dumps(found))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--ace-mode", help="'stock', or the part of slots to skip")
    parser.addoption("--ace-out", help="file for the outcomes")


def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    options = early_config.known_args_namespace
    attacher = None if options.ace_mode == STOCK else Attacher(float(options.ace_mode))
    if attacher:
        attacher.install()
    early_config.pluginmanager.register(Recorder(options.ace_out, attacher))
