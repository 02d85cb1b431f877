"""Every format decodes what its formula says, value by value, for shapes that divide and shapes that do not."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from format_cases import CASES, Dice, encode, fp8_block, metadata, nvfp4, packed
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ace_moe.checkpoint.formats import Facts, Header, Stored, understand
from ace_moe.checkpoint.memory import DTYPES
from ace_moe.errors import CheckpointError

EXACT = 1e-6  # relative, fp32 against float64


def headers_of(tensors: dict[str, Tensor]) -> dict[str, Header]:
    def header(t: Tensor) -> Header:
        if t.dtype == torch.float4_e2m1fn_x2:  # a file's header counts values, not bytes
            return Header("F4", (*t.shape[:-1], 2 * t.shape[-1]))
        return Header(DTYPES[t.dtype], tuple(t.shape))

    return {name: header(t) for name, t in tensors.items()}


def stored(tensors: dict[str, Tensor], config: dict, name: str = "x.weight", files: dict | None = None) -> Stored:
    return understand(headers_of(tensors), Facts(config, files or {}))[name]


def decode(tensors: dict[str, Tensor], config: dict, name: str = "x.weight", files: dict | None = None) -> Tensor:
    found = stored(tensors, config, name, files)
    assert not found.problem, found.problem
    return found.read(lambda key: tensors[key])


def assert_means(found: Tensor, meant: np.ndarray) -> None:
    wanted = torch.from_numpy(meant)
    assert found.dtype == torch.float32 and found.shape == wanted.shape
    assert (found.double() - wanted).norm() <= EXACT * wanted.norm()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("n", "k"), [(64, 64), (96, 32)])
def test_a_linear_layer(case: str, n: int, k: int) -> None:
    tensors, meant = encode(case, n, k, seed=n + k)
    named = {f"x.{part}": t for part, t in tensors.items()}
    assert_means(decode(named, CASES[case][2], files=metadata(case, "x.weight", k)), meant)


@settings(max_examples=40)
@given(st.integers(1, 70), st.integers(1, 70), st.sampled_from([1, 7, 16, 32]), st.integers(0, 99))
def test_fp8_blocks_of_any_size(n: int, k: int, block: int, seed: int) -> None:
    """Ragged on either side, one block, more blocks than rows."""
    tensors, meant = fp8_block(Dice(seed), n, k, block)
    named = {f"x.{part}": t for part, t in tensors.items()}
    assert_means(decode(named, {"weight_block_size": [block, block]}), meant)


@settings(max_examples=40)
@given(
    st.integers(1, 40), st.integers(1, 20), st.sampled_from([2, 4, 8]), st.sampled_from([1, 2, 3]), st.booleans(),
    st.sampled_from(["", "random", "unset"]), st.integers(0, 99),
)  # fmt: skip
def test_packed_integers_of_any_size(
    n: int, size: int, bits: int, groups: int, zeros: bool, order: str, seed: int
) -> None:
    """Rows and columns that do not fill their words."""
    tensors, meant = packed(Dice(seed), n, size * groups, bits, groups, zeros, order)
    named = {f"x.{part}": t for part, t in tensors.items()}
    assert_means(decode(named, {"num_bits": bits}), meant)


@settings(max_examples=20)
@given(st.sampled_from([3, 5, 6, 7]), st.integers(33, 80), st.booleans())
def test_bits_that_do_not_divide_a_word(bits: int, k: int, dense: bool) -> None:
    """Across words in recent files, not in old ones; refused where the width is the same in both."""
    codes = Dice(k).codes((3, k), bits)
    each = 32 // bits
    clear = -(-k * bits // 32) != -(-k // each)
    count = -(-k * bits // 32) if dense else -(-k // each)
    out = np.zeros((3, count), dtype=object)
    for j in range(k):
        place = j * bits if dense else 32 * (j // each) + bits * (j % each)
        for row in range(3):
            value = int(codes[row, j]) << (place % 32)
            out[row, place // 32] |= value & 0xFFFFFFFF
            if value >> 32:
                out[row, place // 32 + 1] |= value >> 32
    words = torch.from_numpy(out.astype(np.uint32).view(np.int32).copy())
    tensors = {"x.weight_packed": words, "x.weight_scale": torch.ones(3, 1), "x.weight_shape": torch.tensor([3, k])}
    if clear:
        return assert_means(decode(tensors, {"num_bits": bits}), codes - float(1 << (bits - 1)))
    with pytest.raises(CheckpointError, match="more than one known way"):
        decode(tensors, {"num_bits": bits})


@pytest.mark.parametrize(("m", "block"), [(48, 32), (60, 32), (8, 128), (64, 32)])
def test_each_half_of_a_fused_matrix_has_a_ragged_grid(m: int, block: int) -> None:
    """As transformers merges per-expert FP8 grids: the up half's blocks start at its own first row."""
    halves = [[fp8_block(Dice(2 * e + half), m, 40, block) for half in range(2)] for e in range(3)]
    tensors = {
        "e.gate_up_proj": torch.stack([torch.cat([h[0]["weight"] for h in pair]) for pair in halves]),
        "e.gate_up_proj_scale_inv": torch.stack(
            [torch.cat([h[0]["weight_scale_inv"] for h in pair]) for pair in halves]
        ),
    }
    meant = np.stack([np.concatenate([h[1] for h in pair]) for pair in halves])
    config = {"weight_block_size": [block, block]}
    assert_means(decode(tensors, config, "e.gate_up_proj"), meant)
    one = stored(tensors, config, "e.gate_up_proj").expert(lambda key: tensors[key], 1)
    assert_means(one, meant[1])


@pytest.mark.parametrize(
    "shape",
    [(), (1,), (3,), (3, 1), (3, 1, 1), (3, 24), (3, 24, 1), (3, 40), (3, 2)],
    ids=lambda s: "x".join(map(str, s)),
)
def test_factors_of_a_stack(shape: tuple[int, ...]) -> None:
    """One for all, one for each expert, for each row, for each column, for each half."""
    w, s = Dice(0).fp8((3, 24, 40)), Dice(1).factors(shape, 1e-3)
    meant = np.empty((3, 24, 40))
    for e in range(3):
        for i in range(24):
            for j in range(40):
                place = {1: 0, 24: i, 40: j, 2: i // 12}
                at = (e, *(place[size] for size in shape[1:])) if shape[:1] == (3,) else (0,) * len(shape)
                meant[e, i, j] = float(w[e, i, j]) * float(s[at])
    tensors = {"e.gate_up_proj": w, "e.gate_up_proj_weight_scale": s}
    assert_means(decode(tensors, {}, "e.gate_up_proj"), meant)


def test_a_square_stack_does_not_say_which_way_its_factors_go() -> None:
    tensors = {"e.down_proj": Dice(0).fp8((3, 8, 8)), "e.down_proj_weight_scale": Dice(1).factors((3, 8), 1e-3)}
    assert "unclear" in stored(tensors, {}, "e.down_proj").problem


def test_nvfp4_stack_has_a_factor_for_each_expert() -> None:
    parts = [nvfp4(Dice(e), 8, 32) for e in range(3)]
    tensors = {
        "e.up_proj": torch.stack([p["weight_packed"] for p, _ in parts]),
        "e.up_proj_weight_scale": torch.stack([p["weight_scale"] for p, _ in parts]),
        "e.up_proj_weight_scale_2": torch.stack([1 / p["weight_global_scale"][0] for p, _ in parts]),
    }
    assert_means(decode(tensors, {}, "e.up_proj"), np.stack([m for _, m in parts]))


def test_gpt_oss_layer() -> None:
    """Blocks [E, n, k/32, 16] decode to the transpose that the model holds."""
    d = Dice(0)
    codes, e = d.codes((2, 6, 64), 4), d.rng.integers(118, 124, (2, 6, 2))
    table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
    meant = np.empty((2, 64, 6))
    for x in range(2):
        for i in range(6):
            for j in range(64):
                meant[x, j, i] = table[codes[x, i, j]] * 2.0 ** (e[x, i, j // 32] - 127.0)
    blocks = (codes[..., ::2] | codes[..., 1::2] << 4).astype(np.uint8).reshape(2, 6, 2, 16)
    tensors = {
        "e.down_proj_blocks": torch.from_numpy(blocks),
        "e.down_proj_scales": torch.from_numpy(e.astype(np.uint8)),
    }
    assert_means(decode(tensors, {}, "e.down_proj"), meant)


GPTQ_LIES = {  # (first format on disk, symmetric on disk, what the configuration says)
    "asymmetric, nothing said": (True, False, {}),
    "asymmetric, called symmetric": (True, False, {"quant_method": "gptq", "sym": True}),
    "second format, called the first": (False, True, {"quant_method": "gptq", "sym": True}),
    "first format, called the second": (
        True,
        True,
        {"quant_method": "gptq", "sym": True, "checkpoint_format": "gptq_v2"},
    ),
}


@pytest.mark.parametrize("lie", GPTQ_LIES)
def test_zero_points_that_contradict_the_configuration(lie: str) -> None:
    from format_cases import gptq

    first, symmetric, config = GPTQ_LIES[lie]
    tensors = {f"x.{p}": t for p, t in gptq(Dice(0), 32, 64, first=first, sym=symmetric)[0].items()}
    with pytest.raises(CheckpointError, match=r"x\.qweight.*stored less one"):
        decode(tensors, config)
