"""Recognising mixtures of experts: what each expert does with a row, its parameters, who chooses, and what is summed."""
