"""A plan file cut, flipped or edited anywhere, at random: refused, or harmless in everything that reads it."""

from __future__ import annotations

import json
import struct
from contextlib import suppress
from pathlib import Path

import pytest
from bad_input_cases import rewrite
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ace_moe import ACE, AceError, Plan
from ace_moe.cli import show
from ace_moe.errors import PlanError
from edits import replace_somewhere


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory, good_plan: Plan) -> tuple[Path, bytes]:
    """A file to overwrite again and again, and the bytes of the good plan."""
    path = tmp_path_factory.mktemp("scratch") / "plan.safetensors"
    return path, good_plan.save(path).read_bytes()


def refused_bytes(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    with pytest.raises(PlanError, match=r"truncated.*build it again with `ace plan MODEL -o FILE`"):
        Plan.load(path)


@pytest.mark.parametrize("keep", [0, 1, 7, 8, 9, 64])
def test_plan_cut_in_its_header(keep: int, scratch: tuple[Path, bytes]) -> None:
    refused_bytes(scratch[0], scratch[1][:keep])


@given(share=st.floats(0, 1, exclude_max=True))
@settings()
def test_plan_cut_anywhere(scratch: tuple[Path, bytes], share: float) -> None:
    """A file shorter by any number of bytes, one included, is not taken for a plan."""
    path, data = scratch
    refused_bytes(path, data[: int(share * len(data))])


@given(data=st.one_of(st.binary(max_size=400), st.binary(max_size=80).map(lambda b: struct.pack("<Q", len(b)) + b)))
@settings()
def test_random_bytes(scratch: tuple[Path, bytes], data: bytes) -> None:
    """Also behind a header length that is right."""
    refused_bytes(scratch[0], data)


@pytest.mark.filterwarnings("ignore:no threshold was mapped")
@given(seed=st.data())
@settings(max_examples=200)
def test_flipped_header_bytes(scratch: tuple[Path, bytes], seed: st.DataObject) -> None:
    """A damaged header is refused, or what is left of it is a plan that can be used; never anything else."""
    path, data = scratch
    end = 8 + struct.unpack("<Q", data[:8])[0]
    position, byte = seed.draw(st.integers(0, end - 1)), seed.draw(st.integers(0, 255))
    path.write_bytes(data[:position] + bytes([byte]) + data[position + 1 :])
    use_or_refuse(path)


@pytest.mark.filterwarnings("ignore:no threshold was mapped")
@given(seed=st.data())
@settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow])
@pytest.mark.long
def test_edited_metadata(scratch: tuple[Path, bytes], seed: st.DataObject) -> None:
    """Any value anywhere in the metadata: refused when the plan is loaded, or harmless in everything that reads it."""
    path, data = scratch
    path.write_bytes(data)
    rewrite(path, meta=lambda meta: replace_somewhere(meta, seed))
    use_or_refuse(path)


def use_or_refuse(path: Path) -> None:
    """What commands do with a plan; only errors of ours may come out."""
    try:
        plan = Plan.load(path)
    except PlanError:
        return
    json.dumps(show.plan_json(plan))
    show.print_plan(show.Console(quiet=True), plan)
    assert plan.check_model(plan.fingerprint) is plan
    with suppress(AceError):
        ACE(plan, 0.5)
