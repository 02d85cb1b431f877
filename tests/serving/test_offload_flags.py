"""Experts in host memory under vLLM: which flags are added, and what is refused."""

from types import SimpleNamespace

import pytest

from ace_moe.engines.vllm.offload import WEIGHTS, offload_flags
from ace_moe.errors import OptionError

PLAIN = SimpleNamespace()
MXFP4 = SimpleNamespace(quantization_config={"quant_method": "mxfp4"})


@pytest.mark.parametrize("flags", [["--cpu-offload-gb", "20", "--port", "1"], ["--cpu_offload_gb=20"]])
def test_the_experts_are_named(flags):
    found, said = offload_flags(flags, PLAIN)
    assert found == ["--offload-backend", "uva", "--cpu-offload-params", *WEIGHTS, "--moe-backend", "triton", *flags]
    assert said is not None and "20 GiB" in said


def test_what_the_user_chose_stays():
    own = ["--cpu-offload-gb", "4", "--cpu-offload-params", "w2_weight", "--moe-backend", "marlin"]
    assert offload_flags(own, PLAIN)[0] == ["--offload-backend", "uva", *own]
    assert offload_flags(["--cpu-offload-gb", "4"], MXFP4)[0][-4:] == [
        "--moe-backend",
        "marlin",
        "--cpu-offload-gb",
        "4",
    ]


@pytest.mark.parametrize("flags", [[], ["--port", "8000"], ["--cpu-offload-gb", "0"], ["--cpu-offload-gb", "junk"]])
def test_nothing_is_added_unasked(flags):
    assert offload_flags(flags, PLAIN) == (flags, None)


@pytest.mark.parametrize(
    "flags", [["--offload-backend", "prefetch"], ["--offload-group-size=8", "--cpu-offload-gb", "4"]]
)
def test_whole_layers_are_refused(flags):
    with pytest.raises(OptionError, match="skipping saves nothing"):
        offload_flags(flags, PLAIN)


def test_copies_of_whole_layers_by_environment_are_refused(monkeypatch):
    monkeypatch.setenv("VLLM_WEIGHT_OFFLOADING_DISABLE_UVA", "1")
    with pytest.raises(OptionError, match="unset"):
        offload_flags(["--cpu-offload-gb", "4"], PLAIN)
