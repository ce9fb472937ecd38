"""Checkpoints: when, what, in which format, and the way back."""
