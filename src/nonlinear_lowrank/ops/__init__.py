"""What the operators of several methods share: activations, the choice of kernels, custom ops."""
