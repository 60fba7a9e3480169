"""Gradients, and what ranks share of weights, gradients and the optimizer's state."""
