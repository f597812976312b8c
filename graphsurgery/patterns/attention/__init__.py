"""Attention as exporters write it: finding it, reading it, its keys, values and masks."""
