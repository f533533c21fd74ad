"""A file for each operator: its options, the generator of its inputs, and how its results are compared."""
