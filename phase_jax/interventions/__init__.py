"""Causal tools: what is changed inside a trained model, and what is read there (SPEC §7)."""
