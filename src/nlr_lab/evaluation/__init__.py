"""Evaluation of trained models: losses of texts and held-out data, scores of tasks by lm-eval or in generated text."""
