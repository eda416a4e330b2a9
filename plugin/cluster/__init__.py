"""Ray: placement, actors, arrays, remote calls."""
