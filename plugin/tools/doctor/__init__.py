"""Checks of this machine and of the agreement between parallel layouts."""
