"""``verify`` at depth ``regions``: only what differs between two models is run, in pieces.

Both graphs are numbered so that equal expressions of equal inputs have one number, whatever their names. Where a node
that both models have reads different values, these two must be equal: they bound a region, which is lifted out of both
models and run on random data. What is taken to be equal there is equal from there on; so every difference between the
graphs ends in a region, or reaches an output and is told there.
"""
