"""The refusal that every backend and the planner share; it needs no torch."""

from __future__ import annotations


class Unsupported(Exception):
    """This backend cannot run this walk here. The message is the reason, with the values and, where there is one, the remedy."""
