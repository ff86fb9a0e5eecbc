"""Parts of the modeling file that a saved model carries (`hub.modeling_file`): plain formulas without this package.

`core` is in every file, a method's part in those of models that use it: a file named after the method, and one named
after it with `_experts` for its layers in place of experts. These stand on `methods.expert_layouts`, which is a part
too, with the model's file of `methods.expert_classes` where it has one. A part imports torch, transformers and other
parts, no more; it enters a file without its module docstring, so what a reader of the file needs is in its classes.
"""
