"""Rational activations (nora.txt), and their adapters NoRA and NoRA++."""
