"""What every room stands on: errors, packets and trees, keyed randomness, small pure helpers."""
