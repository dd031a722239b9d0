"""Learning rules: frozen values with pure functions over arrays."""
