"""A reducer for skyrl-engine in which the median response of a group sets the scale."""
