"""Routers of random models that route like real ones: how flat gates are, and how many experts a batch shares.

A token's logits are s · (√(1 − c) · own + √c · (√(1 − ρ) · group + √ρ · bias)): `own` is drawn for each token and expert,
`group` for each token and group of about k experts, `bias` for each group alone, so ρ makes some groups popular. Groups, because
independent normal logits put more on the first gate and less on the second than real routers do. The union of a batch
depends on ρ alone and the shares on s, so each is fitted by itself, on the router alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...checkpoint.model import MoEModel
from ...errors import OptionError, StructureError
from ...mapping.recipe import bisect

UNIFORM, FLAT, SKEWED = "uniform", "flat", "skewed"
KINDS = (UNIFORM, FLAT, SKEWED)
# Qwen3-30B-A3B, from the published medians of its softmax ranks 1 to 8 (.077 .058 .048 .040 .034 .030 .027 .024)
SHARES = (0.228, 0.172, 0.142, 0.118, 0.101, 0.089, 0.080, 0.071)
UNION, BATCH = 49, 16  # experts that 16 tokens read of 128 in its top-8; uniform routing reads 82
ASSUMED = (
    "49 of 128 experts at 16 tokens is an assumption: the published mean is over steps of at most 16 requests, and how much "
    "of it is skew and how much are smaller batches cannot be told."
)
COMMON = 0.96  # c
TOKENS, DRAWS = 1 << 14, 8  # simulated for a fit: the mean of 1,024 batches is known to half a percent
CONSTANT = 8.0  # what every embedding has in its first component, in units of its spread: biases need a direction
CALIBRATION = 512  # random tokens that each layer's router is fitted on


def check_kind(kind: str, union: float | None) -> None:
    if kind not in KINDS:
        raise OptionError(f"--routing is one of {', '.join(KINDS)}; {kind!r} is not.")
    if union is not None and kind != SKEWED:
        raise OptionError(f"--union is for --routing {SKEWED}; {kind} routing reads what chance gives.")


def uniform_union(experts: int, slots: float, tokens: int) -> float:
    """Distinct experts that `tokens` tokens of `slots` slots each need if every expert is as likely."""
    return experts * (1 - (1 - slots / experts) ** tokens)


def target_shares(k: int) -> Tensor:
    """Shares of the k largest gates, [k]: the published curve cut off at k, or going on as it ends."""
    ratio = SHARES[-1] / SHARES[-2]
    curve = [*SHARES, *(SHARES[-1] * ratio**n for n in range(1, k))][:k]
    return torch.tensor(curve) / sum(curve)


def best_spread(top: Tensor) -> float:
    """The factor on the k largest logits [T, k] whose shares come closest to the published ones."""
    wanted = target_shares(top.shape[1]).to(top.device)
    tried = [n / 50 for n in range(10, 200)]
    return min(tried, key=lambda s: float(((s * top).softmax(-1).mean(0) - wanted).abs().max()))


def mean_union(logits: Tensor, k: int, batch: int) -> float:
    """logits [T, E] → distinct experts a batch of tokens reads, the mean over all batches."""
    batches = len(logits) // batch
    ids = logits[: batches * batch].topk(k, dim=-1).indices.view(batches, -1)
    return float(torch.zeros(batches, logits.shape[1]).scatter_(1, ids, 1).sum(1).mean())


@dataclass(frozen=True)
class RandomRouter:
    """A router of `experts` experts, k a token: logits spread by s, ρ of their variance common to all tokens."""

    kind: str
    experts: int
    k: int
    spread: float = 1.0
    skew: float = 0.0

    @classmethod
    def like(cls, kind: str, experts: int, k: int, union: float | None = None) -> RandomRouter:
        """Fitted: `union` is what 16 tokens read where routing is skewed."""
        check_kind(kind, union)
        flat = cls(kind, experts, k)
        if kind == SKEWED:
            flat = cls(kind, experts, k, skew=flat._skew_for(default_union(experts, k) if union is None else union))
        top = torch.cat([logits.topk(k).values for logits in flat.draws(1)])
        return cls(kind, experts, k, best_spread(top), flat.skew)

    @property
    def groups(self) -> int:
        return max(1, self.experts // self.k)

    def _members(self, groups: Tensor) -> Tensor:
        """Give each group's row to its experts, [groups, n] → [E, n]; groups of k or a few more, none of less than a token's."""
        return groups[torch.arange(self.experts, device=groups.device) * self.groups // self.experts]

    def rows(self, width: int, generator: torch.Generator) -> Tensor:
        """The part of logits that differs from token to token, [E, width]: random directions, or logits of so many tokens."""
        device = generator.device
        own = torch.randn(self.experts, width, generator=generator, device=device)
        groups = torch.randn(self.groups, width, generator=generator, device=device)
        return self.spread * ((1 - COMMON) ** 0.5 * own + (COMMON * (1 - self.skew)) ** 0.5 * self._members(groups))

    def biases(self, seed: int) -> Tensor:
        """The part that all tokens' logits share, [E, 1]: normal quantiles, so that their spread does not depend on luck."""
        spread = torch.special.ndtri((torch.arange(self.groups) + 0.5) / self.groups)
        order = torch.randperm(self.groups, generator=torch.Generator().manual_seed(seed))
        return self.spread * (COMMON * self.skew) ** 0.5 * self._members(spread[order].unsqueeze(1))

    def logits(self, tokens: int, seed: int = 0) -> Tensor:
        """[T, E]: the router alone."""
        return (self.rows(tokens, torch.Generator().manual_seed(seed)) + self.biases(seed)).T

    def draws(self, batch: int) -> Iterator[Tensor]:
        """Logits of at least `batch` tokens under several draws of the biases, as a model has one for each layer."""
        return (self.logits(max(TOKENS // DRAWS, batch), seed) for seed in range(DRAWS))

    def union(self, batch: int) -> float:
        """Experts that many tokens read."""
        if self.kind != SKEWED:
            return uniform_union(self.experts, self.k, batch)
        return _simulated_union(self, batch)

    def _skew_for(self, union: float) -> float:
        chance, least = uniform_union(self.experts, self.k, BATCH), replace(self, skew=1.0).union(BATCH)
        if not least <= union <= chance:
            raise OptionError(
                f"--union {union:g} is out of reach: {BATCH} tokens of {self.k} slots read {least:.1f} to {chance:.1f} of "
                f"{self.experts} experts, depending on how skewed routing is."
            )

        def saved(skew: float) -> float:
            return 1 - replace(self, skew=skew).union(BATCH) / chance

        return bisect(saved, 1 - union / chance, 0.002, 16).threshold


@cache
def _simulated_union(router: RandomRouter, batch: int) -> float:
    return sum(mean_union(logits, router.k, batch) for logits in router.draws(batch)) / DRAWS


def default_union(experts: int, k: int) -> float:
    """The assumed union, as the same part of what chance gives where there are other numbers of experts."""
    return UNION * uniform_union(experts, k, BATCH) / uniform_union(128, 8, BATCH)


@torch.no_grad()
def shape_routers(model: PreTrainedModel, kind: str, union: float | None = None) -> RandomRouter | None:
    """Give a random model's routers this routing, each layer fitted on what reaches it; None: left as they are."""
    sites = MoEModel.of(model).sites
    router = RandomRouter.like(kind, sites[0].num_experts, sites[0].top_k, union)
    if kind == UNIFORM:
        return None
    embeddings = model.get_input_embeddings().weight
    if kind == SKEWED:
        embeddings[:, 0] = CONSTANT * embeddings[:, 1:].float().std()
    owners = [_linear(model.get_submodule(str(site.router_path)), router.experts) for site in sites]
    generator = torch.Generator().manual_seed(0)  # on the CPU: the same on every device
    ids = torch.randint(len(embeddings), (1, CALIBRATION), generator=generator)
    with _fitted(owners, router):
        model(input_ids=ids.to(model.device), use_cache=False, logits_to_keep=1)
    return router


@contextmanager
def _fitted(owners: list[nn.Module], router: RandomRouter) -> Iterator[None]:
    """Give each router its weights when a pass reaches it: what comes before it routes as it will."""

    def fit(seed: int, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        x = args[0].reshape(-1, args[0].shape[-1]).float()
        module.weight[: router.experts] = weights(router, x, seed)  # type: ignore[operator]

    with ExitStack() as hooks:
        for seed, owner in enumerate(owners):
            hooks.enter_context(owner.register_forward_pre_hook(partial(fit, seed)))
        yield


def weights(router: RandomRouter, x: Tensor, seed: int) -> Tensor:
    """Router weights [E, d] that give inputs like x [T, d] the router's logits.

    Biases lie along the inputs' mean, which every token has in it; the rest of the weights does not look there.
    """
    mean = x.mean(0)
    along = mean / mean.dot(mean)
    rows = router.rows(x.shape[1], torch.Generator(x.device).manual_seed(seed))
    wanted = rows.std()
    rows -= (rows @ mean).outer(along)
    rows *= wanted / (x @ rows.T).std(0).mean()
    rows += router.biases(seed).to(x.device) * along
    top = (x @ rows.T).topk(router.k).values
    return rows * best_spread(top)  # whom a token is sent to does not depend on a common factor


def _linear(router: nn.Module, experts: int) -> nn.Module:
    """The part of a router that multiplies by one row for each expert."""
    for module in router.modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, Tensor) and weight.dim() == 2 and len(weight) >= experts:
            return module
    raise StructureError(f"{type(router).__name__} has no row of weights for each expert; use --routing {UNIFORM}.")
