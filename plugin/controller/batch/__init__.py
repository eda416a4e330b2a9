"""From groups of responses to the batches of the optimizer steps."""
