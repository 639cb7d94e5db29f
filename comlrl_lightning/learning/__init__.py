"""Credit, losses and optimizer steps as plain objects, independent of Lightning modules."""
