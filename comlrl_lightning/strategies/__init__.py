"""Lightning strategies: agents on devices of their own, frozen weights in shards."""
