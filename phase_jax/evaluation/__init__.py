"""The phase sweep: every logical sample on every residue, scored at the last position."""
