"""A script that ends its process when it is imported."""

import sys

sys.exit("no arguments")
