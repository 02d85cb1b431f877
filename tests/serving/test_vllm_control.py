"""The reports of several ranks are added up to one, in which each token counts once."""

from __future__ import annotations

import pytest
from serving_parts import reply

from ace_moe.errors import IntegrationError
from ace_moe.integrations.vllm.control import merge


def test_ranks_that_see_the_same_tokens_count_once() -> None:
    same, parts = merge([reply(0), reply(1)]), merge([reply(0, split=True), reply(1, split=True)])
    assert same["prefill"] == {"routed": 160, "kept": 120, "realised": 0.25}
    assert parts["prefill"] == {"routed": 320, "kept": 240, "realised": 0.25}
    assert list(same["layers"]) == ["2", "10"] and same["layers"]["2"]["decode"]["realised"] == 0.75
    with pytest.raises(IntegrationError, match="not configured"):
        merge([reply(0), {"error": "Skipping is not configured"}])
