"""The functional learner: steps, windows and chunks as pure functions over arrays."""
