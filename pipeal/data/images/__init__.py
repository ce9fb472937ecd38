"""Image data sets, decoded once and kept, augmented batch by batch."""
