"""What is computed on a rollout before its updates: log-probs, values, teachers' scores."""
