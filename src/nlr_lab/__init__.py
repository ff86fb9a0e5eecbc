"""The workbench behind the command `nlr`: recipes, training, comparisons, benchmarks."""
