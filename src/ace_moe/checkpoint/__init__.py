"""From a checkpoint folder, a hub repository or a model in memory to `MoELayer` records, one at a time.

model = MoEModel.open("Qwen/Qwen3-30B-A3B")     # or a folder, or MoEModel.of(loaded_model)
for layer in model.layers():                    # dequantised, about one layer in memory
    ...
"""

from .model import MoEModel, resolve
from .records import MoELayer, Projections
from .structure import Site

__all__ = ["MoELayer", "MoEModel", "Projections", "Site", "resolve"]
