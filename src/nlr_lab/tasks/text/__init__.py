"""Causal and masked language models on text."""
