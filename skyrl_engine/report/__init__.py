"""`report.html`: what a run was, its curves, its time and what it was trained on, in one file that opens from disk."""
