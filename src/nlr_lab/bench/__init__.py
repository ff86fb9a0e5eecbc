"""Time and memory of operators, steps and tokens over a baseline's."""
