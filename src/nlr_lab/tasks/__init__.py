"""Tasks: data and models of text, images and fine-tuning."""
