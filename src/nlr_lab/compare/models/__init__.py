"""Trials of models that are trained by the Trainer: from scratch, or tuned from a checkpoint."""
