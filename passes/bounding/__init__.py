"""How a bound on the context is found and written."""
