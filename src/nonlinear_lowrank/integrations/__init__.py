"""Other trainers and parallelisms: the Hugging Face Trainer, torchtitan, tensor parallelism."""
