"""Files in object stores, by fsspec: addresses, calls that are tried again, reading, and copies of run directories."""
