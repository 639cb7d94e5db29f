"""Task items on their way to the module."""
