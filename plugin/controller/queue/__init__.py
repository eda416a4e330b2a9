"""Groups of responses on their way from the task through the engines to the trainer."""
