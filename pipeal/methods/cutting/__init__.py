"""Cuts a network that was written for backpropagation into parts, whatever method trains them.

:func:`pipeal.methods.cutting.cut.cut` is the way in: it takes a list or a row of blocks as they are, and cuts the
traced graph of any other forward (``graph``), where it is told or where costs say (``shares``).
"""
