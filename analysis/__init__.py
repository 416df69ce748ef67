"""Samples in, tables out: loading, fits, intervals, verdicts. Imports no torch and draws nothing."""
