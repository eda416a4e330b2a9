"""What a run writes and shows: run files, metrics, detectors, the report page."""
