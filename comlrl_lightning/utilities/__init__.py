"""Checks of arguments, calls of user functions, communication between ranks, random streams."""
