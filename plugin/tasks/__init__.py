"""Tasks: where prompts come from and how responses are rewarded."""
