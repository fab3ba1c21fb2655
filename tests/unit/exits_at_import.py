"""A module of a user that ends the process that imports it."""

import sys

sys.exit(0)
