"""What layers have learned, as plain values: snapshots, states of layers, saved pipelines."""
