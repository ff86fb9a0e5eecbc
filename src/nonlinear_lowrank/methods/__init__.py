"""Methods, one folder each; `base` has their base classes and registry."""
