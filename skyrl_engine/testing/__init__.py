"""The conformance kit: Hypothesis strategies and abstract suites that any plugin can be held to."""
