"""Optimizer, train step, loop, checkpoints."""
