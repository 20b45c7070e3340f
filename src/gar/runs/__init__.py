"""The run directory: names, states, failures, comparison of configurations, packing, reading."""
