"""What a run shows and leaves to look at: rows, tables, pictures, pages."""
