"""Skipping in transformers models: an experts implementation named `ace`.

    ace = ACE.load("plan.safetensors", skip=0.5)
    with ace(model):
        model.generate(...)
    print(ace.realised)

`attachment` puts a layer's decider into a model and takes it out again, `experts` runs what is left, `passes` says what each
token of a pass is; `generation` says where a prompt ends.
"""

from .attachment import Attachment, attached_to, attachments_in
from .experts import on_gpu
from .modules import base_of

__all__ = ["Attachment", "attached_to", "attachments_in", "base_of", "on_gpu"]
