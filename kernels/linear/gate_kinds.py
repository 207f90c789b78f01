"""Gated activations that a linear layer can apply to its outputs, see `activation/op`."""

NO_GATE, SILU, TANH_GELU = range(3)
