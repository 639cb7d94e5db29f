"""Rollouts of a team on task items: records and their collection."""
