"""Recognising repeated layers: chains of equal parts along the residual stream, each unified with the others."""
