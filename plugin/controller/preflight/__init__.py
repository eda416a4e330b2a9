"""What can be found wrong before an actor starts."""
