"""Methods, a folder each; `base` has what they are and the registry."""
