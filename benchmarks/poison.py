"""Random weights of sane size in every format vLLM serves, and experts poisoned so that whoever reads them shows it."""

from __future__ import annotations

from typing import Any

import torch

from ace_moe.engines.vllm.backends import distinct_reason, kernel_of, kernel_reason, parts_of
from ace_moe.engines.vllm.executor import Redirect
from serving import AceWorker

WIDE = 0.02  # how wide weights are
FP8, INT4, MXFP4 = 64.0, 4.6, 120  # how wide their codes are; of MXFP4 the exponent that makes e2m1's 2.9 that wide


# ---- weights ----------------------------------------------------------------------------------------------------


@torch.no_grad()
def fill(model: Any) -> None:
    """Random weights in whatever code a parameter is, before vLLM packs them for its kernels."""
    generator = torch.Generator(next(model.parameters()).device).manual_seed(0)
    for name, parameter in model.named_parameters():
        p, last = parameter.data, name.rpartition(".")[2]
        if last.endswith(("weight_scale", "scale_inv", "scales")):
            p.fill_(MXFP4 if p.dtype == torch.uint8 else WIDE / (FP8 if last.endswith("inv") else INT4))
        elif p.dtype == torch.float8_e4m3fn:
            wide = torch.empty(p.shape, dtype=torch.bfloat16, device=p.device)
            p.copy_(wide.normal_(0, FP8, generator=generator))
        elif p.dtype in (torch.uint8, torch.int32):
            if last.endswith(("weight", "qweight")):
                p.view(torch.uint8).random_(0, 256, generator=generator)
        elif last.endswith(("bias", "sinks", "A_log")):
            p.zero_()
        elif p.dim() > 1:
            p.normal_(0, 10 if "embed_tokens" in name else WIDE, generator=generator)
        else:
            p.fill_(1)
    for name, buffer in model.named_buffers():
        if name.endswith(("layer_scalar", "per_expert_scale")):
            buffer.fill_(1)


def fill_dummies() -> None:
    """In front of the packing: what it leaves is not to be written over."""
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    stock = DummyModelLoader.load_weights

    def load_weights(self: Any, model: Any, model_config: Any) -> None:
        stock(self, model, model_config)
        fill(model)

    DummyModelLoader.load_weights = load_weights


# ---- in the worker ----------------------------------------------------------------------------------------------


class PoisonWorker(AceWorker):
    """RPCs of check_executors.py."""

    def bench_weights(self) -> None:
        """They were filled when they were loaded."""

    def _runners(self) -> list[Any]:
        modules = self.model_runner.model.modules()  # type: ignore[attr-defined]
        return [m for m in modules if hasattr(m, "routed_experts") and hasattr(m, "router")]

    def check_facts(self) -> dict[str, Any]:
        """The classes that run the experts, and the ways that were chosen and refused."""
        experts = [runner.routed_experts for runner in self._runners()]
        kernels = [kernel_of(e) for e in experts]
        facts: dict[str, Any] = {"kernels": sorted({type(p).__name__ for k in kernels for p in parts_of(k)})}
        chosen = getattr(getattr(self._runners()[0], "ace_decider", None), "chosen", None)
        if chosen is not None:
            facts |= {"executor": str(chosen), "refused": chosen.refused}
            facts["native"] = kernel_reason(experts[0], kernels[0], untried=True) or "by its source"
        return facts

    def check_poison(self, tokens: list[int]) -> dict[str, Any]:
        """Every layer, with every second expert poisoned: what their slots are in the way of skipping, and if they are run."""
        from vllm.v1.worker.workspace import unlock_workspace

        unlock_workspace()  # a way that is not the engine's own needs more of it
        runners = self._runners()
        before = {(i, t): self._outputs(r, t) for i, r in enumerate(runners) for t in tokens}
        changed = sum(poison(runner.routed_experts) for runner in runners)
        after = {(i, t): self._outputs(r, t) for i, r in enumerate(runners) for t in tokens}
        moved = [float((before[key]["skipped"] - after[key]["skipped"]).abs().max()) for key in before]
        bites = all(not sane(after[key]["run"]) for key in before)
        return {
            "tensors": changed, "cases": len(before), "same": not any(moved), "moved": max(moved), "bites": bites,
            "finite": all(sane(found["skipped"]) for found in after.values()),
            "off_redirect": max((found["off"] for found in before.values() if "off" in found), default=None),
        }  # fmt: skip

    @torch.no_grad()
    def _outputs(self, runner: Any, tokens: int) -> dict[str, Any]:
        """[T, d] with every second expert's slots skipped, and with all of them run; how far the first is from redirecting."""
        from vllm.forward_context import set_forward_context

        x, gates, ids, skipped = case(runner, tokens)
        run, kept = runner.routed_experts.stock_forward, torch.where(ids < 0, 0, gates)
        with set_forward_context(None, self.vllm_config, num_tokens=tokens):
            out = {
                "skipped": runner.ace_executor(run, x, kept, ids).clone(),
                "run": runner.ace_executor(run, x, gates, skipped).clone(),
            }
            if not distinct_reason(kernel_of(runner.routed_experts)):
                other = Redirect()(run, x, kept, ids).float()
                out["off"] = float((out["skipped"].float() - other).abs().max() / other.square().mean().sqrt())
        return out


def sane(out: torch.Tensor) -> bool:
    return bool(torch.isfinite(out).all()) and float(out.abs().max()) < 1e6


def case(runner: Any, tokens: int) -> tuple[Any, Any, Any, Any]:
    """x [T, d], gates [T, k], ids with −1 at every second expert's slots, and the ids before; each token has slots of both."""
    config = runner.moe_config
    experts, k, d = config.num_experts, config.experts_per_token, config.hidden_dim
    generator = torch.Generator().manual_seed(tokens)
    gates, ids = torch.rand(tokens, experts, generator=generator).topk(k)
    ids[:, 0] -= torch.where((ids % 2 == 1).all(-1), 1, 0)  # to a neighbour, which the token does not have
    ids[:, -1] += torch.where((ids % 2 == 0).all(-1), 1, 0)
    marked = torch.where(ids % 2 == 1, -1, ids)
    x = torch.randn(tokens, d, generator=generator)
    to = {"device": config.device}
    dtype = runner.moe_config.in_dtype
    return x.to(dtype=dtype, **to), gates.softmax(-1).to(**to), marked.int().to(**to), ids.int().to(**to)


@torch.no_grad()
def poison(experts: Any) -> int:
    """Every second expert's weights or scales: NaN, or as large as their code allows. The number of tensors changed."""
    count, changed = experts.moe_config.num_experts, 0
    for name, tensor in tensors_of(experts):
        if tensor.dim() < 2 or tensor.shape[0] != count or "bias" in name:
            continue
        part = tensor[1::2]
        if tensor.dtype in (torch.float8_e4m3fn, torch.float8_e4m3fnuz):
            part.view(torch.uint8).fill_(0x7F)
        elif tensor.is_floating_point():
            part.fill_(torch.nan)
        elif tensor.dtype == torch.uint8 and "scale" in name:
            part.fill_(254)
        else:
            continue
        changed += 1
    return changed


def tensors_of(experts: Any) -> list[tuple[str, Any]]:
    """Parameters, and where vLLM keeps packed tensors of triton_kernels instead, the scales in those."""
    found, kernel = [(name, p.data) for name, p in experts.named_parameters()], kernel_of(experts)
    if distinct_reason(kernel):
        config = kernel.quant_config
        scales = (config.w1_precision.weight_scale, config.w2_precision.weight_scale)
        found += [(f"{at}.scale", getattr(scale, "storage", scale).data) for at, scale in enumerate(scales)]
    return found


fill_dummies()  # workers import this module by the name of its class
