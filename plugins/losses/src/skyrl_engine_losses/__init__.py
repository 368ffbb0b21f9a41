"""Loss functions and off-policy corrections for skyrl-engine: supervised, policy-gradient, critic and regularising ones."""
