"""A cluster on a laptop: what every kind of rank of a job builds, holds, sends and computes."""
