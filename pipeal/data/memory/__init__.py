"""How large a batch may be: a model of a step's peak memory."""
