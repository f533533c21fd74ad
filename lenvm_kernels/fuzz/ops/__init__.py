"""One file per operator: its options, the generator of its inputs, and the comparison of its results."""
