"""Findings of the compiler and about users' steps: typed records, and the sentences that report them."""
