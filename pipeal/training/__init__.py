"""Training runs: the loop around the engine, and what a run leaves to look at."""
