"""The published methods as native PEFT methods: config classes for `peft.get_peft_model`.

    import nonlinear_lowrank as nlr
    model = peft.get_peft_model(base, nlr.NobleAdapterConfig(r=16, target_modules="all-linear"))

Importing this package's ground (`nonlinear_lowrank`) registers the methods with peft as soon as peft itself is
imported (see `registration`). peft takes seconds to import, so nothing here imports it before it is asked for.
"""
