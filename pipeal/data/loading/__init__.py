"""From files and downloads to batches in memory."""
