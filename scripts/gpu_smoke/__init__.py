"""The first ten minutes with a GPU: predictions measured, CUDA tests and benchmarks run, one JSON and one page left."""
