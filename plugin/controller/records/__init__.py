"""What a job writes into its run directory, and what a resumed job reads there."""
