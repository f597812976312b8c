"""How models get in and out of files: the parts behind :mod:`graphsurgery.model_io`."""
