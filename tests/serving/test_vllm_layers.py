"""Which of the layers vLLM builds are ours: none of a draft model's, whatever its layers are numbered."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from ace_moe.engines.vllm import layers
from ace_moe.errors import IntegrationError


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("tag", "draft"),
    [("eagle_head", True), ("draft_model", True), ("medusa_head", True), ("self_decoder", False)],
)
def test_a_draft_is_known_by_vllms_tag(tag: str, draft: bool) -> None:
    from vllm.compilation.backends import set_model_tag

    assert not layers.is_draft()
    with set_model_tag(tag):
        assert layers.is_draft() is draft
    assert not layers.is_draft()


@pytest.mark.vllm
def test_routing_stays_outside_of_a_models_own_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """gpt-oss has a class of its own: said in the class it derives from, or vLLM takes a kernel that routes by itself."""
    from vllm.model_executor.layers.fused_moe.config import RoutingMethodType
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
    from vllm.model_executor.models.gpt_oss import GptOssRoutedExperts

    layers.register_layers()
    assert issubclass(GptOssRoutedExperts, RoutedExperts)
    for skipping, method in ((None, "theirs"), (object(), RoutingMethodType.Custom)):
        monkeypatch.setattr(layers, "_current", lambda skipping=skipping: skipping)
        config = SimpleNamespace(routing_method="theirs")
        with pytest.raises(TypeError):  # the rest of its arguments: what it is told comes first
            GptOssRoutedExperts("model.layers.0.mlp.experts", None, config)
        assert config.routing_method == method
        assert getattr(config, "require_decomposed_backend", False) == (skipping is not None)


@pytest.mark.vllm
def test_layers_that_would_not_do_what_the_rule_says_are_refused() -> None:
    """A router of its own; and a pruned checkpoint in vLLM 0.33: a skipped slot would become expert 0's, with gate 0."""
    from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter

    own = {"__init__": lambda self: None, "_compute_routing": None, "routing_method_type": None}
    router = type("Common", (BaseRouter,), own)()
    experts = SimpleNamespace(quant_method=SimpleNamespace(is_monolithic=False))
    runner = SimpleNamespace(layer_name="model.layers.3.mlp.experts", routed_experts=experts, router=router)
    layers.refuse(runner)
    experts.expert_substitution = object()
    with pytest.raises(IntegrationError, match=r"layers\.3.*replaced by constants"):
        layers.refuse(runner)
    runner.router = object()
    with pytest.raises(IntegrationError, match=r"layers\.3.*its router \(object\)"):
        layers.refuse(runner)
