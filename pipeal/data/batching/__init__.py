"""Which samples form a batch: fixed, planned, size-aware, streamed."""
