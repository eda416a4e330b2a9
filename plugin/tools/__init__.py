"""Tools that read the core and are never imported by it."""
