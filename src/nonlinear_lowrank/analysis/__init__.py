"""What a model costs: parameters, FLOPs, bytes kept for backward, and the time of a step."""
