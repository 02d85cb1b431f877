"""Skipping in transformers models: an experts implementation named `ace`.

    ace = ACE.load("plan.safetensors", skip=0.5)
    with ace(model):
        model.generate(...)
    print(ace.realised)

`attachment` puts a layer's decider into a model and takes it out again, `experts` runs what is left, `passes` says what each
token of a pass is, `generation` where a prompt ends, `again` what layers that a backward pass runs again were told.
"""

from .attachment import Attachment
from .experts import on_gpu
from .models import attached_to, base_of

__all__ = ["Attachment", "attached_to", "base_of", "on_gpu"]
