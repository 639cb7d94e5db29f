"""Ready-made task sets, one file each: items, formatters, reward, transition, metrics; no torch and no lightning."""
