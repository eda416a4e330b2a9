"""Save and load: sharded state, the checkpoint directory, RNG state."""
