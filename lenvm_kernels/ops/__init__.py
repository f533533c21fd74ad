"""The operators: one file per kernel family, named after its public function."""
