"""Drawings of the recorded tables. One file a figure of the paper; `python -m figures.draw` draws them."""
