"""The published methods as native PEFT methods: config classes for `peft.get_peft_model`.

    import nonlinear_lowrank as nlr
    model = peft.get_peft_model(base, nlr.NobleAdapterConfig(r=16, target_modules="all-linear"))

`import nonlinear_lowrank` does not import this folder: peft takes seconds. See `hub.registration`.
"""

from nonlinear_lowrank.validation import require

require("peft", "peft")  # first: importing peft imports all methods' adapters
