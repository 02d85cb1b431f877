"""Which of the layers vLLM builds are ours: none of a draft model's, whatever its layers are numbered."""

from __future__ import annotations

import pytest

from ace_moe.integrations.vllm import layers


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("tag", "draft"),
    [("eagle_head", True), ("draft_model", True), ("medusa_head", True), ("self_decoder", False)],
)
def test_a_draft_is_known_by_vllms_tag(tag: str, draft: bool) -> None:
    from vllm.compilation.backends import set_model_tag

    assert not layers._is_draft()
    with set_model_tag(tag):
        assert layers._is_draft() is draft
    assert not layers._is_draft()
