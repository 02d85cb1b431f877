"""A policy of one's own: skip a slot whose gate is small against the token's mean gate.

ace plan MODEL --plan plan.safetensors --text sample.txt --policy spread:Spread
ace compare MODEL --methods share,spread:Spread:power=2 --text sample.txt
"""

from dataclasses import dataclass

from torch import Tensor

from ace_moe.policies import Routing, TokenPolicy


@dataclass(frozen=True, kw_only=True)
class Spread(TokenPolicy):
    """c_i = (g_i / (g_i + mean_j g_j))^power, [T, k] in [0, 1)."""

    power: int = 1

    def contribution(self, routing: Routing) -> Tensor:
        g = routing.gates.float().abs()
        return (g / (g + g.mean(-1, keepdim=True))) ** self.power
