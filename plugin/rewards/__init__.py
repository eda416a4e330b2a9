"""Rewards: what the text of a response is worth, computed in processes of their own."""
