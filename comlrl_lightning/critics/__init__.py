"""Critics and the joint reward model."""
