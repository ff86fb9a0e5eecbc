"""Pretrained models on GLUE, instructions and images."""
