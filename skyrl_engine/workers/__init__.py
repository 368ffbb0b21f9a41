"""Run on ranks: launch them, ship shards to them, and call them."""
