"""Errands around the suite. Nothing imports this room."""
