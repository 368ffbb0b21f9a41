"""The promises of advantage estimators."""
