"""How a network learns without one backward through all of it: one room or file per method."""
