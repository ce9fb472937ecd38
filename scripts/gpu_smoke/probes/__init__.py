"""The probes: each a function that measures one thing, in a process of its own."""
