"""Sampling loops."""
