"""The operators: one kernel family a file, its public function of the same name."""
