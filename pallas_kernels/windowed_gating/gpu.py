"""Windowed gating on Hopper GPUs (Mosaic GPU)."""
