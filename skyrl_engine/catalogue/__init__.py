"""Catalogues of plugins: an index of wheels that were verified, what makes one, and what installs from one."""
