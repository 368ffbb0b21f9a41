"""An examination of this machine and of what is installed on it: findings with remedies, a self-test, and a file for a bug report."""
