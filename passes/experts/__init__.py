"""How ``gather-experts`` writes an expert block: one module a strategy, and what they share.

``program`` reads the body of a site, ``steps`` replays it, ``parameters`` gives the experts' weights as views or stacks,
``routing`` sorts the rows by expert and adds the results up.
"""
