"""The parts of the structural comparison of two models: unfolding, numbering, matching, and what the report says."""
