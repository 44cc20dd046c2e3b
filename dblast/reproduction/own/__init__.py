"""A drafter for a target of one's own: what it needs, what fits into the time, the run, its evaluation and report."""
