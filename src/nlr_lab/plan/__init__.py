"""Parameters, FLOPs, memory and hours of a model before it is built."""
