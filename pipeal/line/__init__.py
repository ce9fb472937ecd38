"""A line of stages that come and go: each is a process of its own, started, ended and taken up again on its own.

::

    stage 0 ════► stage 1 ════► stage 2        items, numbered on each link; nothing but what is counted comes back
      feed         F send B U    F send B U
      └ snapshot   └ snapshot    └ snapshot    each in its own folder, with the items that the next has not saved yet

What a stage makes of its items is a function of these items and of its last snapshot alone. So it may end at any time,
and do again what it had not saved: the stage before still has the items, and the stage after drops what it has already.
"""
