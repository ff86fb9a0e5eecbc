"""Image classification from scratch, and language models of image tokens."""
