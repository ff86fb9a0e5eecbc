"""Sine low-rank weights (sine_lowrank.txt), and their adapters sine-LoRA and sine-DoRA."""
