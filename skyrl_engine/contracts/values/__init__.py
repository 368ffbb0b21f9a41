"""The values that cross contracts: columns, plans, outputs, topology."""
