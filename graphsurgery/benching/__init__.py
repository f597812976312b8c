"""The parts of a benchmark: points, processes that measure, samples, gates, and the forms of the report."""
