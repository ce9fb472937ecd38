"""Cuts a network that was written for backpropagation into parts, whatever method trains them."""
