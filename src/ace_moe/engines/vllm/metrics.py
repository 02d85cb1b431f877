"""The report as Prometheus text. Counters live in the workers; this only writes down what they say at a scrape."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ...budget import PHASES, Budget


def exposition(reports: Mapping[str, Mapping[str, Any]], model: str) -> str:
    """Text for the end of a /metrics page: the report of each engine, with vLLM's own labels `model_name` and `engine`.

    A registry of its own, made for one scrape: vLLM's is shared by several processes through files when there is more
    than one API server, and values set there by one process would be added up with the others'.
    """
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry()
    registry.register(_Collector(reports, model))
    return generate_latest(registry).decode()


class _Collector:
    def __init__(self, reports: Mapping[str, Mapping[str, Any]], model: str):
        self.reports, self.model = reports, model

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        by, whole = ["model_name", "engine", "layer", "phase"], ["model_name", "engine", "phase"]
        yield self._by_layer(
            CounterMetricFamily("ace:slots_routed", "Routed slots of real tokens", labels=by), "routed"
        )
        yield self._by_layer(CounterMetricFamily("ace:slots_kept", "Slots that the rule keeps", labels=by), "kept")
        restored = CounterMetricFamily(
            "ace:slots_restored", "Slots run because their expert was read anyway", labels=by
        )
        yield self._by_layer(restored, "restored")
        yield from self._reads(CounterMetricFamily, ["model_name", "engine", "steps"])
        yield self._by_layer(
            GaugeMetricFamily(
                "ace:realised_ratio", "Fraction of routed slots not executed since the last reset", labels=by
            ),
            "realised",
        )
        threshold = GaugeMetricFamily("ace:threshold", "Contribution under which a slot is skipped", labels=whole)
        budget = GaugeMetricFamily("ace:budget", "Fraction of routed slots asked to be skipped", labels=whole)
        for engine, report in self.reports.items():
            for phase in PHASES:
                threshold.add_metric([self.model, engine, phase], report["threshold"][phase])
            if report["skip"] is not None:  # else only a threshold was set
                for name, value in Budget.parse(report["skip"])._asdict().items():
                    budget.add_metric([self.model, engine, name], value)
        yield threshold
        yield budget

    def _reads(self, family: Any, labels: list[str]) -> Iterator[Any]:
        """Experts read and experts the router asked for, summed over layers and steps, where they are counted."""
        read = family("ace:experts_read", "Experts that steps read, over all layers", labels=labels)
        asked = family("ace:experts_asked", "Experts that the router asked for", labels=labels)
        for engine, report in self.reports.items():
            for steps, found in report.get("reads", {}).items():
                read.add_metric([self.model, engine, steps], found["read"])
                asked.add_metric([self.model, engine, steps], found["asked"])
        yield read
        yield asked

    def _by_layer(self, family: Any, name: str) -> Any:
        for engine, report in self.reports.items():
            for layer, phases in report["layers"].items():
                for phase in (p for p in PHASES if p in phases):
                    family.add_metric([self.model, engine, layer, phase], phases[phase][name])
        return family
