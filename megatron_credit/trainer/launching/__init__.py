"""From a run's configuration to a launched run: the plan, the checks before it is submitted, its
files, and what `status`, `stop` and `logs` show of it. Light to import."""
