"""What is trained: text, language models."""
