"""Words and pictures: reports, plans, checks."""
