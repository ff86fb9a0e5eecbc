"""The learnable activations that Table 3 of nora.txt compares with, as arms of `nlr compare`: "activations:prelu".

Each freezes the model but its new head, and puts one activation with trained parameters of its own in every
block in the place of GELU.
"""

from functools import partial

from nlr_lab.reproduce.nora_arms import activations

prelu, arelu, elu = (partial(activations, kind=kind) for kind in ("prelu", "arelu", "elu"))
