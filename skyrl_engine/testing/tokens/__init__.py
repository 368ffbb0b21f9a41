"""Promises that losses and corrections share: both give one number per loss-carrying token."""
