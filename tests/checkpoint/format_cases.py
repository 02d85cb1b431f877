"""Encoders of every format: random codes and factors on disk, and in float64 what they mean, value by value.

The meaning is written as slow loops over the formulas, so that it shares nothing with the decoders under test.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

Encoded = tuple[dict[str, Tensor], np.ndarray]  # tensors on disk, and W [n, k] in float64
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]
ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


class Dice:
    """Random codes and factors of the sizes that weights have."""

    def __init__(self, seed: int):
        self.rng = np.random.default_rng(seed)

    def codes(self, shape: tuple[int, ...], bits: int) -> np.ndarray:
        return self.rng.integers(0, 1 << bits, shape)

    def factors(self, shape: tuple[int, ...], size: float, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.from_numpy(np.asarray(self.rng.uniform(0.5, 2.0, shape) * size)).to(dtype)

    def fp8(self, shape: tuple[int, ...]) -> Tensor:
        return torch.from_numpy(self.rng.normal(0, 100, shape)).clamp(-440, 440).to(torch.float8_e4m3fn)


def words(codes: np.ndarray, bits: int) -> Tensor:
    """[n, c] → int32 words along rows, the lowest bits first; the last word may not be full."""
    n, count = codes.shape
    each = 32 // bits
    out = np.zeros((n, -(-count // each)), dtype=np.uint32)
    for j in range(count):
        out[:, j // each] |= codes[:, j].astype(np.uint32) << np.uint32(bits * (j % each))
    return torch.from_numpy(out.view(np.int32).copy())


def scaled(values: Tensor, factors: Tensor, rows: int, columns: int) -> np.ndarray:
    v, s = values.double().numpy(), factors.double().numpy()
    out = np.empty(v.shape)
    for i in range(v.shape[0]):
        for j in range(v.shape[1]):
            out[i, j] = v[i, j] * s[i // rows, j // columns]
    return out


def fp8_block(d: Dice, n: int, k: int, block: int = 16, name: str = "weight_scale_inv") -> Encoded:
    w, s = d.fp8((n, k)), d.factors((-(-n // block), -(-k // block)), 1e-3)
    return {"weight": w, name: s}, scaled(w, s, block, block)


def fp8_ue8m0(d: Dice, n: int, k: int) -> Encoded:
    w, e = d.fp8((n, k)), d.rng.integers(110, 118, (-(-n // 16), -(-k // 16)))
    s = torch.from_numpy(2.0 ** (e - 127.0))
    return {"weight": w, "scale": s.to(torch.float8_e8m0fnu)}, scaled(w, s, 16, 16)


def fp8_channel(d: Dice, n: int, k: int) -> Encoded:
    w, s = d.fp8((n, k)), d.factors((n, 1), 1e-3, torch.bfloat16)
    return {"weight": w, "weight_scale": s, "input_scale": torch.tensor([9.0])}, scaled(w, s, 1, k)


def fp8_row(d: Dice, n: int, k: int) -> Encoded:
    """ModelOpt's per-channel factors have one dimension."""
    w, s = d.fp8((n, k)), d.factors((n,), 1e-3)
    return {"weight": w, "weight_scale": s}, scaled(w, s[:, None], 1, k)


def fp8_tensor(d: Dice, n: int, k: int) -> Encoded:
    w, s = d.fp8((n, k)), d.factors((), 1e-3)
    return {"weight": w, "weight_scale": s}, scaled(w, s.reshape(1, 1), n, k)


def fp8_four(d: Dice, n: int, k: int) -> Encoded:
    """Block factors with two dimensions too many."""
    tensors, meant = fp8_block(d, n, k, name="weight_scale")
    s = tensors["weight_scale"]
    return {**tensors, "weight_scale": s.reshape(s.shape[0], 1, s.shape[1], 1)}, meant


def mxfp8(d: Dice, n: int, k: int) -> Encoded:
    w, e = d.fp8((n, k)), d.rng.integers(110, 118, (n, k // 32))
    meant = scaled(w, torch.from_numpy(2.0 ** (e - 127.0)), 1, 32)
    return {"weight": w, "weight_scale": torch.from_numpy(e.astype(np.uint8))}, meant


def int8(d: Dice, n: int, k: int) -> Encoded:
    w, s = torch.from_numpy(d.codes((n, k), 8) - 128).to(torch.int8), d.factors((n, 1), 1e-3, torch.bfloat16)
    return {"weight": w, "weight_scale": s}, scaled(w, s, 1, k)


def int8_zero(d: Dice, n: int, k: int) -> Encoded:
    tensors, _ = int8(d, n, k)
    z = torch.from_numpy(d.codes((n, 1), 4) - 8).to(torch.int8)
    meant = scaled(tensors["weight"].double() - z.double(), tensors["weight_scale"], 1, k)
    return {**tensors, "weight_zero_point": z}, meant


def nibbles(codes: np.ndarray) -> Tensor:
    """Two codes in a byte, the first one low."""
    return torch.from_numpy((codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8))


def e2m1(codes: np.ndarray) -> Tensor:
    return torch.tensor([[E2M1[c] for c in row] for row in codes], dtype=torch.float64)


def mxfp4(d: Dice, n: int, k: int, weight: str = "weight_packed", scale: str = "weight_scale") -> Encoded:
    codes, e = d.codes((n, k), 4), d.rng.integers(118, 124, (n, k // 32))
    meant = scaled(e2m1(codes), torch.from_numpy(2.0 ** (e - 127.0)), 1, 32)
    return {weight: nibbles(codes), scale: torch.from_numpy(e.astype(np.uint8))}, meant


def deepseek_fp4(d: Dice, n: int, k: int) -> Encoded:
    tensors, meant = mxfp4(d, n, k, "weight", "scale")
    return {"weight": tensors["weight"].view(torch.int8), "scale": tensors["scale"].view(torch.float8_e8m0fnu)}, meant


def f4_tensor(d: Dice, n: int, k: int) -> Encoded:
    tensors, meant = mxfp4(d, n, k, "weight", "scale")
    return {**tensors, "weight": tensors["weight"].view(torch.float4_e2m1fn_x2)}, meant


def nvfp4(d: Dice, n: int, k: int) -> Encoded:
    codes, s, g = d.codes((n, k), 4), d.factors((n, k // 16), 200, torch.float8_e4m3fn), d.factors((1,), 9000.0)
    meant = scaled(e2m1(codes), s.double() / g.double(), 1, 16)
    names = {"weight_packed": nibbles(codes), "weight_scale": s, "weight_global_scale": g}
    return {**names, "input_global_scale": torch.tensor([300.0])}, meant


def nvfp4_modelopt(d: Dice, n: int, k: int) -> Encoded:
    codes, s, g = d.codes((n, k), 4), d.factors((n, k // 16), 200, torch.float8_e4m3fn), d.factors((), 1e-4)
    meant = scaled(e2m1(codes), s.double() * g.double(), 1, 16)
    return {"weight": nibbles(codes), "weight_scale": s, "weight_scale_2": g, "input_scale": torch.tensor(3.0)}, meant


def packed(d: Dice, n: int, k: int, bits: int = 4, groups: int = 2, zeros: bool = False, order: str = "") -> Encoded:
    """compressed-tensors' pack-quantized; `order`: a g_idx of random groups, or one that is not set."""
    codes, s = d.codes((n, k), bits), d.factors((n, groups), 0.01, torch.bfloat16)
    z = d.codes((n, groups), bits)
    group = d.rng.permutation(np.arange(k) * groups // k) if order == "random" else np.arange(k) // (k // groups)
    meant = np.empty((n, k))
    for i in range(n):
        for j in range(k):
            zero = z[i, group[j]] if zeros else 1 << (bits - 1)
            meant[i, j] = (codes[i, j] - zero) * float(s[i, group[j]])
    tensors = {"weight_packed": words(codes, bits), "weight_scale": s, "weight_shape": torch.tensor([n, k])}
    if zeros:
        tensors["weight_zero_point"] = words(z.T.copy(), bits).mT.contiguous()
    if order:
        tensors["weight_g_idx"] = (
            torch.from_numpy(group.astype(np.int32)) if order == "random" else torch.full((k,), -1)
        )
    return tensors, meant


def gptq(d: Dice, n: int, k: int, bits: int = 4, first: bool = True, sym: bool = False, order: bool = True) -> Encoded:
    groups = 2
    codes, s = d.codes((k, n), bits), d.factors((groups, n), 0.01, torch.float16)
    z = np.full((groups, n), 1 << (bits - 1)) if sym else d.codes((groups, n), bits)
    group = d.rng.permutation(np.arange(k) * groups // k) if order else np.arange(k) // (k // groups)
    meant = np.empty((n, k))
    for i in range(n):
        for j in range(k):
            meant[i, j] = (codes[j, i] - z[group[j], i]) * float(s[group[j], i])
    stored = words(z, bits)
    if first:  # as its writers do: one less in each field of a whole word, borrows included
        ones = sum(1 << p for p in range(0, 32, bits))
        stored = torch.from_numpy(
            ((stored.numpy().view(np.uint32).astype(np.int64) - ones) % (1 << 32)).astype(np.uint32).view(np.int32)
        )
    tensors = {"qweight": words(codes.T.copy(), bits).mT.contiguous(), "qzeros": stored, "scales": s}
    return tensors | ({"g_idx": torch.from_numpy(group.astype(np.int32))} if order else {}), meant


def awq(d: Dice, n: int, k: int) -> Encoded:
    codes, z, s = d.codes((k, n), 4), d.codes((2, n), 4), d.factors((2, n), 0.01, torch.float16)
    meant = np.empty((n, k))
    for i in range(n):
        for j in range(k):
            meant[i, j] = (codes[j, i] - z[j // (k // 2), i]) * float(s[j // (k // 2), i])

    def shuffled(c: np.ndarray) -> Tensor:
        return words(c.reshape(len(c), -1, 8)[:, :, ORDER].reshape(len(c), -1), 4)

    return {"qweight": shuffled(codes), "qzeros": shuffled(z), "scales": s}, meant


def bnb(d: Dice, n: int, k: int, kind: str = "nf4", nested: bool = False) -> Encoded:
    codes, table = d.codes((n * k,), 4), d.rng.normal(0, 1, 16).astype(np.float32)
    blocks = -(-n * k // 64)
    said: dict[str, Any] = {"quant_type": kind, "blocksize": 64, "dtype": "bfloat16", "shape": [n, k]}
    parts = {"quant_map": torch.from_numpy(table)}
    if nested:
        own, second = d.codes((blocks,), 8), d.rng.normal(0, 1, 256).astype(np.float32)
        outer = d.factors((-(-blocks // 2),), 0.01)
        said |= {"nested_blocksize": 2, "nested_dtype": "float32", "nested_offset": 0.03}
        absmax = np.array([float(second[own[b]]) * float(outer[b // 2]) + 0.03 for b in range(blocks)])
        parts |= {"absmax": torch.from_numpy(own.astype(np.uint8)), "nested_absmax": outer}
        parts |= {"nested_quant_map": torch.from_numpy(second)}
    else:
        parts["absmax"] = d.factors((blocks,), 0.05)
        absmax = parts["absmax"].double().numpy()
    meant = np.array([float(table[c]) * absmax[i // 64] for i, c in enumerate(codes)]).reshape(n, k)
    data = torch.from_numpy((codes[::2] << 4 | codes[1::2]).astype(np.uint8))[:, None]
    state = torch.tensor(list(json.dumps(said).encode()), dtype=torch.uint8)
    names = {f"weight.{p}": t for p, t in parts.items()}
    return {"weight": data, **names, f"weight.quant_state.bitsandbytes__{kind}": state}, meant


def bnb_int8(d: Dice, n: int, k: int) -> Encoded:
    w, s = torch.from_numpy(d.codes((n, k), 8) - 128).to(torch.int8), d.factors((n,), 0.1)
    return {"weight": w, "SCB": s, "weight_format": torch.tensor(0, dtype=torch.uint8)}, scaled(
        w, s[:, None] / 127, 1, k
    )


def torchao(d: Dice, n: int, k: int, kind: str = "int8") -> Encoded:
    s = d.factors((n, 1), 1e-3)
    if kind == "fp8":
        w = d.fp8((n, k))
        return {"_weight_qdata": w, "_weight_scale": s}, scaled(w, s, 1, k)
    w, z = (torch.from_numpy(d.codes(shape, 8) - 128).to(torch.int8) for shape in ((n, k), (n, 1)))
    meant = scaled(w.double() - z.double(), s, 1, k)
    return {"_weight_qdata": w, "_weight_scale": s, "_weight_zero_point": z}, meant


GROUPS = {"config_groups": {"group_0": {"weights": {"num_bits": 4}, "input_activations": {"num_bits": 8}}}}
CT, BLOCK = {"quant_method": "compressed-tensors", **GROUPS}, {"quant_method": "fp8", "weight_block_size": [16, 16]}
ROUND = {"quant_method": "auto-round", "sym": True}
Case = tuple[Callable[..., Encoded], dict[str, Any], dict[str, Any]]
CASES: dict[str, Case] = {  # name → (encoder, its options, quantization_config)
    "fp8 block": (fp8_block, {}, BLOCK),
    "fp8 block ue8m0": (fp8_ue8m0, {}, {**BLOCK, "scale_fmt": "ue8m0"}),
    "fp8 block of compressed-tensors": (fp8_block, {"name": "weight_scale"}, {**CT, "block_structure": [16, 16]}),
    "fp8 block of Mistral": (fp8_block, {"name": "qscale_weight"}, BLOCK),
    "fp8 block with four dimensions": (fp8_four, {}, BLOCK),
    "fp8 channel": (fp8_channel, {}, CT),
    "fp8 channel of ModelOpt": (fp8_row, {}, {}),
    "fp8 tensor": (fp8_tensor, {}, {}),
    "mxfp8": (mxfp8, {}, CT),
    "int8": (int8, {}, CT),
    "int8 with zero points": (int8_zero, {}, CT),
    "mxfp4": (mxfp4, {}, CT),
    "fp4 of DeepSeek-V4": (deepseek_fp4, {}, {"quant_method": "fp8", "weight_block_size": [128, 128]}),
    "fp4 as F4": (f4_tensor, {}, {}),
    "nvfp4": (nvfp4, {}, CT),
    "nvfp4 of ModelOpt": (nvfp4_modelopt, {}, {}),
    "int4": (packed, {}, CT),
    "int4 channel": (packed, {"groups": 1}, CT),
    "int4 with zero points": (packed, {"zeros": True}, CT),
    "int4 act-order": (packed, {"order": "random"}, CT),
    "int4 act-order with zero points": (packed, {"order": "random", "zeros": True}, CT),
    "int4 with g_idx not set": (packed, {"order": "unset"}, CT),
    "int8 packed": (packed, {"bits": 8}, CT),
    "int8 packed with zero points": (packed, {"bits": 8, "zeros": True}, CT),
    "gptq": (gptq, {}, {"quant_method": "gptq", "sym": False, "checkpoint_format": "gptq"}),
    "gptq without config": (gptq, {"sym": True}, {}),
    "gptq v2": (gptq, {"first": False}, {"quant_method": "gptq", "sym": False, "checkpoint_format": "gptq_v2"}),
    "gptq symmetric": (gptq, {"sym": True, "order": False}, {"quant_method": "gptq", "sym": True}),
    "gptq 8 bit": (gptq, {"bits": 8}, {"quant_method": "gptq", "sym": False}),
    "gptq 2 bit": (gptq, {"bits": 2}, {"quant_method": "gptq", "sym": False}),
    "autoround": (gptq, {"sym": True, "order": False}, {**ROUND, "packing_format": "auto_round:auto_gptq"}),
    "autoround asymmetric": (gptq, {"first": False, "order": False}, {**ROUND, "packing_format": "auto_round", "sym": False}),
    "awq": (awq, {}, {"quant_method": "awq", "version": "gemm"}),
    "bitsandbytes nf4": (bnb, {}, {"quant_method": "bitsandbytes"}),
    "bitsandbytes nf4 nested": (bnb, {"nested": True}, {"quant_method": "bitsandbytes"}),
    "bitsandbytes fp4": (bnb, {"kind": "fp4"}, {"quant_method": "bitsandbytes"}),
    "bitsandbytes int8": (bnb_int8, {}, {"quant_method": "bitsandbytes"}),
    "torchao int8": (torchao, {}, {"quant_method": "torchao"}),
    "torchao fp8": (torchao, {"kind": "fp8"}, {"quant_method": "torchao"}),
}  # fmt: skip


def encode(case: str, n: int, k: int, seed: int = 0) -> Encoded:
    encoder, options, _ = CASES[case]
    return encoder(Dice(seed), n, k, **options)


def metadata(case: str, name: str, k: int) -> dict[str, str]:
    """What torchao writes into the file of a weight of this name."""
    kind = {"torchao int8": "Int8Tensor", "torchao fp8": "Float8Tensor"}.get(case)
    return {name: json.dumps({"_type": kind, "_data": {"block_size": [1, k]}})} if kind else {}
